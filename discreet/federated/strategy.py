"""DP-FedAvg as a Flower Strategy."""

from __future__ import annotations

from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from discreet.federated.grid_transport import GridTransport, read_reply
from discreet.federated.run_folder import Checkpoint
from discreet.federated.server_messages import parameters_record
from discreet.federated.training_run import Outcome, TrainingRun


class DPFedAvg(Strategy):
    """DP-FedAvg as a Flower Strategy.

    `start` runs the whole training, with budget, resume and streaming, which Flower's own loop does not have. The
    `configure_*` and `aggregate_*` methods do one round each, so that Flower's loop would give the same rounds.

    Args:
      training: the rounds, and where they are written.
      transport: asks the clients.
      checkpoint: where to start.
    """

    def __init__(self, training: TrainingRun, transport: GridTransport, *, checkpoint: Checkpoint) -> None:
        self.training, self.transport, self.checkpoint = training, transport, checkpoint
        self.cohort: list[int] = []
        self.outcome = Outcome(checkpoint, None)

    def summary(self) -> None:
        """Logs what is about to run."""
        self.training.announce()

    def start(  # type: ignore[override]  # rounds, deadlines and evaluation come from the plan
        self, grid: Grid, initial_arrays: ArrayRecord | None = None, **_: object
    ) -> Result:
        """Runs the plan; `outcome` then says how it ended."""
        self.summary()
        self.outcome = self.training.run(self.checkpoint)
        self.checkpoint = self.outcome.checkpoint
        result = Result()
        result.arrays = parameters_record(self.outcome.model.params)
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draws the cohort of the next round and makes its messages.

        Raises:
          BudgetSpentError: the round would pass a budget.
        """
        self.training.check_budget()
        self.training.wait_for_members()
        self.cohort = self.training.draw_cohort(self.checkpoint)
        before = self.checkpoint
        return self.transport.messages(before.round + 1, before.params, before.clip_norm, self.cohort)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Does the next round with these replies: clips, adds up, charges, noises, steps, writes the checkpoint."""
        number, size = self.checkpoint.round + 1, self.checkpoint.params.numel()
        # A second reply to the same message is not counted again.
        single = {message.metadata.reply_to_message_id: message for message in replies}
        read = (
            read_reply(message, message.metadata.src_node_id, round_number=number, num_params=size)
            for message in single.values()
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
