"""Flower's grid in one process, whose clients are Discreet's own ClientApp: for tests of secure
aggregation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.superlink.grid import InMemoryGrid

from discreet.deployment.certificates import make_node, make_peers
from discreet.flower.serving import run
from discreet.ledger.durable_ledger import DurableLedger
from discreet.masking.wire import Stage, read_request
from discreet.node.app import train
from discreet.planning.state import State
from discreet.protocol.masked_messages import WHO, read_masking
from discreet.protocol.messages import MASKING
from discreet.run_files.resuming import asked_settings
from discreet.run_files.run_folder import RunFolder
from strategies.dp_fedavg import dp_fedavg
from tests.flower.flower_apps import FakeGrid

TINY = (
    "data.name=breast_cancer",
    "model.name=logistic_regression",
    "training.epochs=1",
    "sampling.kind=everyone",
)
MASKED = (
    "privacy.user.aggregation=secure",
    "privacy.accountant=rdp",
    "privacy.user.noise_multiplier=1",
)
PATIENT = "server.round_timeout=30"  # for a clock that nobody waits for


def words_of(folder: Path, *more: str, clients: int = 4, rounds: int = 2) -> list[str]:
    """A small run under secure aggregation."""
    last = (
        f"data.num_clients={clients}",
        f"rounds={rounds}",
        f"output_dir={folder}",
        "privacy.user.too_noisy=warn",
    )
    return [*TINY, *MASKED, *last, *more]


def stages_of(message: Message) -> set[Stage]:
    """What a message asks for; nothing if it asks who a node is."""
    request, _ = read_masking(message.content)
    return set() if request == WHO else {part.stage for part in read_request(request)[1]}


Lost = Callable[[int, Message], bool]


def nobody(client: int, message: Message) -> bool:
    """Every message is answered."""
    return False


@dataclass
class Nodes(FakeGrid):
    """Nodes 1, 2, ... whose ClientApp runs in this process; not a simulation.

    Attributes:
      configs: of each node, what its owner has set up.
      lost: whether a client gives no reply to a message.
      killed_at: the server dies before it sends this stage, if any.
      said: what clients replied to which message, in order.
    """

    configs: dict[int, dict[str, str | int]] = field(default_factory=dict)
    lost: Lost = nobody
    killed_at: Stage | None = None
    is_lost: dict[str, bool] = field(default_factory=dict)
    said: list[tuple[Message, Message]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.answers = {node: partial(self._reply, node) for node in self.configs}

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        asked = list(messages)
        if self.killed_at is not None and any(
            self.killed_at in stages_of(message) for message in asked
        ):
            raise ServerKilled
        return super().push_messages(asked)

    def _reply(self, node: int, message: Message) -> RecordDict | Error | None:
        number = message.metadata.message_id
        if number not in self.is_lost:  # decided once, however often the server looks
            self.is_lost[number] = MASKING in message.content and self.lost(node, message)
        if self.is_lost[number]:
            return None
        reply = train(message, Context(1, node, dict(self.configs[node]), RecordDict(), {}))
        self.said.append((message, reply))
        return reply.error if reply.has_error() else reply.content

    def refusals(self) -> list[str]:
        """Why clients refused."""
        return [reply.error.reason or "" for _, reply in self.said if reply.has_error()]

    def asked(self, stage: Stage) -> list[Message]:
        """The messages of a stage that were answered."""
        return [
            message
            for message, reply in self.said
            if stage in stages_of(message) and not reply.has_error()
        ]


class ServerKilled(BaseException):
    """The server's process is gone at once."""


@dataclass
class Virtual(Nodes, InMemoryGrid):
    """The same as a simulation, whose nodes are virtual clients."""


def virtual(clients: int = 4, lost: Lost = nobody) -> Virtual:
    """The nodes of a simulation, one for each client."""
    return Virtual(configs={number: {} for number in range(1, clients + 1)}, lost=lost)


def nodes(folder: Path, count: int = 4, **more: str) -> Nodes:
    """Nodes with keys, a list of peers, ledgers and state of their own."""
    names = [f"node-{number}" for number in range(count)]
    for name in names:
        make_node(folder, name)
        DurableLedger.create(folder / f"{name}.db")
    peers = make_peers(folder)
    configs: dict[int, dict[str, str | int]] = {
        number: {
            "ledger": str(folder / f"{name}.db"),
            "partition-id": number - 1,
            "num-partitions": count,
            "name": name,
            "identity-key": str(folder / "nodes" / f"{name}.key"),
            "peers": str(peers),
            "masking-state": str(folder / f"{name}.masking"),
            **more,
        }
        for number, name in enumerate(names, 1)
    }
    return Nodes(configs=configs)


def federated(words: list[str], grid: Nodes) -> State | None:
    """A whole run over the grid; its last checkpoint, if there is one."""
    config, call = asked_settings(words)
    logging.getLogger("discreet").setLevel(logging.INFO)
    run(cast(Grid, grid), config, call, strategy=dp_fedavg)
    return RunFolder(Path(str(call.output_dir))).load_checkpoint()
