"""DPFedAvg: the Flower Strategy around the pure round (Message API)."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from discreet.runs import Checkpoint
from discreet.wire import REFUSED_CODE, MalformedMessage, Order, Reply, decode_reply, encode_order, parameters_record
from strategies.exchange import Failure
from strategies.training import TrainingRun

logger = logging.getLogger("discreet")

POLL_SECONDS = 0.05


@dataclass(frozen=True)
class VirtualClients:
    """In a simulation: `num_clients` clients on however many nodes there are, and where they keep their ledger.

    Client c runs on the node c modulo the number of nodes, so that a node that is one client is the usual case, and a
    simulation with fewer nodes still has the population that its configuration declares.
    """

    num_clients: int
    state_folder: str


@dataclass
class GridExchange:
    """Asks clients through Flower's grid, and yields replies as they arrive.

    Attributes:
      grid: Flower's.
      settings: the resolved configuration as JSON, the same for every message.
      timeout: seconds until a round's deadline; who has not replied by then is `late`.
      virtual: in a simulation.
      min_nodes: how many nodes to wait for before a cohort is drawn.
    """

    grid: Grid
    settings: str
    timeout: float
    virtual: VirtualClients | None = None
    min_nodes: int = 1
    nodes: list[int] = field(default_factory=list)

    def members(self) -> Sequence[int]:
        """Virtual clients, or the connected nodes. Waits until `min_nodes` are connected."""
        started = time.monotonic()
        while True:
            self.nodes = sorted(self.grid.get_node_ids())
            if len(self.nodes) >= self.min_nodes:
                break
            if time.monotonic() - started > self.timeout:
                raise TimeoutError(
                    f"{len(self.nodes)} nodes are connected after {self.timeout:g} s; "
                    f"sampling.min_nodes={self.min_nodes}"
                )
            time.sleep(POLL_SECONDS)
        return range(self.virtual.num_clients) if self.virtual else self.nodes

    def ask(
        self, *, round_number: int, params: Tensor, clip_norm: float, cohort: Sequence[int]
    ) -> Iterator[Reply | Failure]:
        """Sends the order to each client and decodes replies as they come, until all are there or the deadline is."""
        messages = self.messages(round_number, params, clip_norm, cohort)
        waiting = dict(zip(self.grid.push_messages(list(messages)), cohort, strict=True)) if cohort else {}
        deadline = time.monotonic() + self.timeout
        while waiting:
            for message in self.grid.pull_messages(list(waiting)):
                # Popped: a second reply to the same message is not counted again.
                client = waiting.pop(message.metadata.reply_to_message_id, None)
                if client is not None:
                    yield read_reply(message, client, round_number=round_number, num_params=params.numel())
            if waiting and time.monotonic() > deadline:
                yield from (
                    Failure(client, "late", f"no reply within {self.timeout:g} s") for client in waiting.values()
                )
                return
            if waiting:
                time.sleep(POLL_SECONDS)

    def messages(self, number: int, params: Tensor, clip_norm: float, cohort: Sequence[int]) -> Iterator[Message]:
        """One training message for each client; the parameters are encoded once."""
        arrays = parameters_record(params)
        for client in cohort:
            order = Order(number, clip_norm, self.settings)
            node = client
            if self.virtual:
                order = Order(number, clip_norm, self.settings, client, self.virtual.state_folder)
                node = self.nodes[client % len(self.nodes)]
            content = encode_order(order, arrays)
            yield Message(content, node, MessageType.TRAIN, ttl=self.timeout, group_id=str(number))


def read_reply(message: Message, client: int, *, round_number: int, num_params: int) -> Reply | Failure:
    """A message from a client as a checked reply, or as the failure that it is."""
    if message.has_error():
        kind = "refused" if message.error.code == REFUSED_CODE else "error"
        return Failure(
            client, kind, str(message.error.reason).strip().splitlines()[-1][:300] if message.error.reason else ""
        )
    try:
        return decode_reply(message.content, round_number=round_number, num_params=num_params)
    except MalformedMessage as error:
        return Failure(client, "malformed", str(error))


class DPFedAvg(Strategy):
    """DP-FedAvg with adaptive clipping as a Flower Strategy: see `strategies.round` for the algorithm.

    `start` runs the whole training, with budget, resume and streaming, which Flower's own loop does not have. The
    `configure_*` and `aggregate_*` methods do one round each, so that Flower's loop would give the same rounds.

    Args:
      training: the plan, ledger and run folder.
      exchange: asks the clients.
      checkpoint: where to start.
    """

    def __init__(self, training: TrainingRun, exchange: GridExchange, *, checkpoint: Checkpoint) -> None:
        self.training, self.exchange, self.checkpoint = training, exchange, checkpoint
        self.cohort: list[int] = []
        self.stopped: str | None = None

    def summary(self) -> None:
        """Logs what is about to run."""
        plan = self.training.plan
        logger.info("%d rounds, expected cohort %g", plan.rounds, plan.settings.expected_cohort)

    def start(  # type: ignore[override]  # rounds, deadlines and evaluation come from the plan
        self, grid: Grid, initial_arrays: ArrayRecord | None = None, **_: object
    ) -> Result:
        """Runs every round of the plan, or until a budget is spent; `stopped` then says why."""
        self.summary()
        outcome = self.training.run(self.checkpoint)
        self.checkpoint, self.stopped = outcome.checkpoint, outcome.stopped
        result = Result()
        result.arrays = parameters_record(self.checkpoint.params)
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draws the cohort of the next round and makes its messages.

        Raises:
          BudgetSpentError: the round would pass a budget.
        """
        self.training.check_budget()
        self.cohort = self.training.draw_cohort(self.checkpoint)
        return self.exchange.messages(
            self.checkpoint.round + 1, self.checkpoint.params, self.checkpoint.clip_norm, self.cohort
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Does the next round with these replies: clips, adds up, charges, noises, steps, writes the checkpoint."""
        number, size = self.checkpoint.round + 1, self.checkpoint.params.numel()
        read = (
            read_reply(message, message.metadata.src_node_id, round_number=number, num_params=size)
            for message in replies
        )
        self.checkpoint, _ = self.training.finish_round(self.checkpoint, read, cohort_size=len(self.cohort))
        return parameters_record(self.checkpoint.params), None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nobody is asked: losses and accuracies of clients are not private. The server has a public test set."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Nothing: see `configure_evaluate`."""
        return None
