"""What `DPFedAvg.start` is given and what it runs: the same for Discreet's own clients and for those of another app."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from torch import Tensor

from discreet.federated.grid_transport import GridTransport
from discreet.federated.masked_transport import MaskedTransport
from discreet.federated.opened_run import OpenedRun
from discreet.federated.run_plan import training_run
from discreet.federated.server_messages import parameters_record
from discreet.federated.session import Session, finish
from discreet.federated.training_run import Outcome, TrainingRun
from discreet.settings.rules import ConfigError

TrainConfig = ConfigRecord | Callable[[int], ConfigRecord]
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


@dataclass(frozen=True, eq=False)
class StartCall:
    """The arguments of `start`, as `flwr.serverapp.strategy.Strategy.start` has them."""

    grid: Grid
    initial_arrays: ArrayRecord
    num_rounds: int
    timeout: float
    train_config: TrainConfig | None = None
    evaluate_config: ConfigRecord | None = None
    evaluate_fn: EvaluateFn | None = None


@dataclass(frozen=True, eq=False)
class ReadyRun:
    """A run that can begin.

    Attributes:
      training: its rounds.
      run: its folder and ledger.
      arrays: parameters (num_params,) as the arrays that the app has.
      close: writes what is left when the rounds are over.
      goes_on_by: what resumes the run if it is interrupted.
      evaluations: what `evaluate_fn` said, by round.
      meanwhile: is entered while the run goes on.
    """

    training: TrainingRun
    run: OpenedRun
    arrays: Callable[[Tensor], ArrayRecord]
    close: Callable[[Outcome], None]
    goes_on_by: str
    evaluations: Mapping[int, MetricRecord] = field(default_factory=dict)
    meanwhile: AbstractContextManager[object] = field(default_factory=nullcontext)


class App(Protocol):
    """Whose clients a strategy drives."""

    def ready(self, call: StartCall, held: ExitStack) -> ReadyRun:
        """A run with these arguments; `held` holds its folder. What is wrong is said here, before anything is sent."""


@dataclass(frozen=True, eq=False)
class OwnApp:
    """Discreet's own clients: everything comes from the configuration, and clients clip and say their bit themselves.

    Attributes:
      session: a run whose folder is open.
      transport: asks the clients.
      meanwhile: see `ReadyRun`.
    """

    session: Session
    transport: GridTransport | MaskedTransport
    meanwhile: AbstractContextManager[object]

    def ready(self, call: StartCall, held: ExitStack) -> ReadyRun:
        """See `App`. Arguments that say something else than the configuration are refused."""
        config, folder = self.session.config, self.session.folder
        given = {"num_rounds": call.num_rounds, "timeout": call.timeout}
        wanted = {"num_rounds": config.rounds, "timeout": config.server.round_timeout}
        if given != wanted or call.train_config or call.evaluate_config or call.evaluate_fn:
            raise ConfigError(f"the arguments of start must be those of the configuration, {wanted} (got {given})")
        return ReadyRun(
            training_run(self.session, self.transport),
            self.session.opened,
            parameters_record,
            partial(finish, self.session),
            goes_on_by=f"resume=true output_dir={folder.path}",
            meanwhile=self.meanwhile,
        )
