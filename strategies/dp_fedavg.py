"""DP-FedAvg with adaptive clipping: start reading here. What a round does, and what of conf decides it.

    drawn     each connected client joins with probability q           sampling.{kind,probability,population_size}
    clipped   each update to L2 norm C_t, by the server once more;     privacy.user.clip.{kind,norm}
              its bit b says whether it was within C_t before
    summed    total = sum of updates, below = sum of (b - 1/2)         privacy.noise: in floats, or exactly on a grid
    charged   one Gaussian for update and bits together, to the        privacy.user.{noise_multiplier,target_epsilon}
              ledger on disk, before anything is noised or released;
              a round that would pass the budget is not begun          privacy.user.max_epsilon
    noised    total by z_update * C_t, below by count_stddev;          privacy.user.{noise_multiplier,clip.count_stddev}
              neither depends on who replied
    released  params += learning_rate * velocity, where velocity =     server.{learning_rate,momentum,shrink_with_noise}
              momentum * velocity + total / (q * population_size)
    adapted   C_{t+1} = C_t * exp(-learning_rate * (share -            privacy.user.clip.{learning_rate,max}
              target_quantile)); share, of the norms within C_t, is    privacy.user.clip.target_quantile
              below / (q * population_size) + 1/2

`discreet.federated.round` does this, pure; `discreet.federated.training_run` repeats it and writes what is left behind.
Source: McMahan et al. 2018 (arXiv 1710.06963), Algorithm 1; Andrew et al. 2021 (arXiv 1905.03871), Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from discreet.client_settings import PRIVACY_DRAWS
from discreet.config import RunConfig
from discreet.federated.grid_transport import GridTransport, read_reply
from discreet.federated.guarantees import count_stddev, expected_cohort, user_event
from discreet.federated.round import CohortSampling, RoundSettings, UserPrivacy
from discreet.federated.run_folder import Checkpoint
from discreet.federated.server_messages import parameters_record
from discreet.federated.session import Session
from discreet.federated.training_run import Outcome, Plan, TrainingRun
from discreet.federated.transport import Transport


def cohort_sampling(config: RunConfig) -> CohortSampling:
    """How the cohorts of a configuration are drawn."""
    return CohortSampling(config.sampling.kind, config.sampling_probability, config.population_size)


def round_settings(config: RunConfig) -> RoundSettings:
    """A round's public constants, of a configuration whose noise is resolved."""
    return RoundSettings(
        expected_cohort=expected_cohort(config),
        learning_rate=config.server.learning_rate,
        momentum=config.server.momentum,
        user=_user_privacy(config) if config.privacy.user.enabled else None,
        shrink_with_noise=config.server.shrink_with_noise,
    )


def _user_privacy(config: RunConfig) -> UserPrivacy:
    user = config.privacy.user
    assert user.noise_multiplier is not None
    return UserPrivacy(
        noise_multiplier=user.noise_multiplier,
        event=user_event(config, user.noise_multiplier),
        count_stddev=count_stddev(config),
        target_quantile=user.clip.target_quantile,
        clip_learning_rate=user.clip.learning_rate,
        clip_max=user.clip.ceiling,
        draws=PRIVACY_DRAWS.get(config.privacy.noise, 1),
        on_grid=config.privacy.noise == "grid",
        largest_cohort=config.population_size,
    )


def training_run(session: Session, transport: Transport) -> TrainingRun:
    """The rounds of a run that is ready to start, with the clients that `transport` asks."""
    config = session.config
    plan = Plan(
        rounds=config.rounds,
        settings=round_settings(config),
        sampling=cohort_sampling(config),
        source=session.source,
        privacy=config.privacy,
        chance_loss=math.log(session.task.num_classes),
    )
    return TrainingRun(plan, session.folder, ledger=session.ledger, transport=transport, evaluate=session.evaluation())


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
