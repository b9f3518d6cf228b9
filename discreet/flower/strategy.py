"""DP-FedAvg as a Flower Strategy, for any Flower app on the Message API."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import NoReturn

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.superlink.grid import InMemoryGrid

from discreet.flower.array_layout import layout_of
from discreet.flower.flower_app import (
    EvaluateFn,
    FlowerApp,
    ServerEvaluation,
    TrainConfig,
    refuse_evaluation,
    said_in_arguments,
)
from discreet.flower.strategy_settings import PrivateEvaluation, flower_settings, refuse_what_is_not_private
from discreet.logs import log_to
from discreet.server.run_context import Interruptible
from discreet.server.server_optimizer import ServerOptimizer
from discreet.server.state import Outcome
from discreet.server.training_run import OnRound
from discreet.settings.rules import ConfigError

logger = logging.getLogger("discreet")

ITSELF = "DPFedAvg does its rounds itself, since sampling, clipping, noise and ledger belong together"
# What people override a part for, and how it is done here.
INSTEAD = {
    "configure_train": "give start a train_config that is a function of the round",
    "aggregate_train": "give on_round=..., which is called after each round",
    "configure_evaluate": "give start an evaluate_fn, or private_evaluation=...",
    "aggregate_evaluate": "give start an evaluate_fn, or private_evaluation=...",
}
AggregateFn = Callable[[list[RecordDict], str], MetricRecord]


class DPFedAvg(Strategy):
    """DP-FedAvg in the place of `flwr.serverapp.strategy.FedAvg`: the server's `start` stays, and clients stay as they
    are.

        strategy = DPFedAvg(fraction_train=0.5, population_size=100, target_epsilon=8.0, output_dir="outputs/private")
        result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=30, evaluate_fn=global_evaluate)

    Guarantee: all that one node holds is hidden by add-or-remove differential privacy (epsilon, delta) from whoever
    sees the models of all rounds, but not who takes part; the server is trusted. In each round a node is asked with
    probability `fraction_train`, independently of all others. The server takes the difference of the arrays that come
    back to those that it sent, as one vector of all learned floats, and clips it to the L2 norm C_t. It adds the
    differences up with equal weights, and noises the sum. A ledger in the run folder is charged before anything is
    released. What else a reply holds (metrics, numbers of examples) is not read. A reply that is late, an error, or
    malformed counts as zero, and changes neither noise nor denominator.

    Args:
      fraction_train: the probability with which each node is in a round's cohort; a cohort may be empty.
      fraction_evaluate: 0: what clients would report of their own data is not private. Evaluate by `evaluate_fn`.
      min_train_nodes: 0: no cohort is filled up. If every node is asked, a floor up to `min_available_nodes` is taken.
      min_evaluate_nodes: 0, as `fraction_evaluate`.
      min_available_nodes: how many nodes must be connected before a round begins.
      weighted_by_key: None: all clients count the same.
      arrayrecord_key: of the record with the arrays, in a message to a client.
      configrecord_key: of the record with the config, in a message to a client.
      train_metrics_aggr_fn: None, as `fraction_evaluate`.
      evaluate_metrics_aggr_fn: None, as `fraction_evaluate`.
      population_size: how many nodes there may be, a public constant: the average is over fraction_train *
        population_size, whoever replies, and no more nodes may be connected.
      population_name: of the population whose account the run charges; given with `account`.
      account: a file, made by `discreet ledger create`: what all runs over the population have spent. It is charged
        before the run's own ledger, and `max_epsilon` then holds over all runs together.
      noise_multiplier: noise per sensitivity, of a round as a whole. Give this or `target_epsilon`.
      target_epsilon: the noise is chosen so that `num_rounds` rounds cost at most this, and it is the budget.
      max_epsilon: a round that would pass it is not begun: the run ends, and `start` returns what there is.
      delta: below 1 / population_size.
      clip_norm: the first clip norm, or the only one with clipping="fixed". None: the first rounds search for it from
        0.1 on, up to 10, by the noised bits that are paid for anyway.
      clipping: "adaptive": the clip norm tracks a quantile of the norms of the differences; or "fixed".
      clip_max: what an adaptive clip norm never passes; None is ten times `clip_norm`, or 10 without it.
      target_quantile: of the norms, which an adaptive clip norm tracks.
      clip_learning_rate: of the steps by which it does so.
      count_stddev: noise on the count of norms below the clip norm; None is a small share of what the round costs.
      sampling: "poisson"; "fixed", that share of the population without replacement; "everyone", with fraction_train=1.
      server_learning_rate: of the server's step, as FedAvgM has it; 1 is FedAvg's.
      server_momentum: of the server's step, as FedAvgM has it; 0 is FedAvg's.
      server_optimizer: in place of these two, `discreet.ServerAdam(eta, beta_1, beta_2, tau)`, as FedAdam, or
        `ServerYogi`, as FedYogi.
      shrink_with_noise: a step is as long as its signal, by the noise that is expected in it.
      accountant: "pld" or "rdp".
      noise: "grid" (exact sums and rounded noise), "float", or "secure_sum" (each value a sum of 4 draws).
      aggregation: "plain", or "secure": the server reads masked sums, which clients noise, and no update. The clients'
        app then has `ClientApp(mods=[discreet.secure_sum_mod])`; sampling="everyone" and accountant="rdp" are needed.
      dropouts: of aggregation="secure": how many nodes may be lost in a round, before it is abandoned unread.
      colluding: how many nodes may work with the server.
      threshold: of how many nodes the shares open a sum; None for the least that is safe.
      too_noisy: "refuse" or "warn", of settings with which noise will drive the model.
      frozen: patterns of names of arrays that stay at the server's value, such as "backbone.*".
      seed: None for secure randomness; a number is for tests in a simulation, and its noise protects nobody.
      private_evaluation: `discreet.PrivateEvaluation(every, metric, noise_multiplier)`: clients rate the model, and the
        mean of what they say is noised and paid for; `evaluate_fn` is then left out. None: they are not asked.
      on_round: is called with the row of metrics.csv of each round, a dict, once the round can't be lost any more; what
        `private_evaluation` finds comes as a row of its own.
      output_dir: the run folder, which must not hold a run; by default one under outputs/, named by the time.
      resume: go on with the run in `output_dir` from its last checkpoint. What decides privacy must be as it was.

    Raises:
      ConfigError: an argument that can't be honoured, in one line that names it.

    Source: McMahan et al. 2018 (arXiv 1710.06963), Algorithm 1; Andrew et al. 2021 (arXiv 1905.03871), Algorithm 1.
    """

    def __init__(
        self,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 0.0,
        min_train_nodes: int = 0,
        min_evaluate_nodes: int = 0,
        min_available_nodes: int = 2,
        weighted_by_key: str | None = None,
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: AggregateFn | None = None,
        evaluate_metrics_aggr_fn: AggregateFn | None = None,
        *,
        population_size: int | None = None,
        population_name: str | None = None,
        account: str | None = None,
        noise_multiplier: float | None = None,
        target_epsilon: float | None = None,
        max_epsilon: float | None = None,
        delta: float = 1e-5,
        clip_norm: float | None = None,
        clipping: str = "adaptive",
        clip_max: float | None = None,
        target_quantile: float = 0.5,
        clip_learning_rate: float = 0.2,
        count_stddev: float | None = None,
        sampling: str = "poisson",
        server_learning_rate: float = 1.0,
        server_momentum: float = 0.0,
        server_optimizer: ServerOptimizer | None = None,
        shrink_with_noise: bool = False,
        accountant: str = "pld",
        noise: str = "grid",
        aggregation: str = "plain",
        dropouts: int = 1,
        colluding: int = 1,
        threshold: int | None = None,
        too_noisy: str = "refuse",
        frozen: Sequence[str] = (),
        seed: int | None = None,
        private_evaluation: PrivateEvaluation | None = None,
        on_round: OnRound | None = None,
        output_dir: str | None = None,
        resume: bool = False,
    ) -> None:
        given = locals()
        self._refuse_overrides()
        with said_in_arguments():
            refuse_what_is_not_private(given)
            config = flower_settings(given)
        patterns = (frozen,) if isinstance(frozen, str) else tuple(frozen)
        metric = private_evaluation.metric if private_evaluation else ""
        self.app = FlowerApp(config, patterns, arrayrecord_key, configrecord_key, metric, on_round)
        self.outcome: Outcome | None = None

    def summary(self) -> None:
        """Nothing: `start` says what is about to run once its folder is open."""

    def start(  # the arguments are Flower's
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: TrainConfig | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Runs the rounds and writes the run folder.

        Args:
          grid: Flower's.
          initial_arrays: what the first round sends. A run that goes on takes only their names, shapes and dtypes.
          num_rounds: in all, those of before a resumption too.
          timeout: seconds to wait for the replies of a round; who is later counts as zero.
          train_config: sent to clients, with the number of the round; or a function of that number that gives it.
          evaluate_config: must be left out.
          evaluate_fn: gets the number of a round and its arrays, before the first round too, and works on data of the
            server's own. What it says is logged and returned, and its loss tells whether training runs away.

        Returns:
          The arrays of the last round (of a run that ran away the best ones), and what `evaluate_fn` said by round.
          Metrics of clients are never in it. `outcome` says whether the run ended before its last round, and why.

        Raises:
          ConfigError, LedgerError: before any client is asked.
          MessagesTooLarge, TimeoutError: messages are refused, or too few nodes are connected; what is done is kept.
        """
        self._refuse_overrides()
        _make_log_visible()
        app, simulated, result = self.app, isinstance(grid, InMemoryGrid), Result()
        with ExitStack() as held:
            with said_in_arguments():
                refuse_evaluation(initial_arrays, evaluate_config, evaluate_fn, private=app.config.evaluation.private)
                server = replace(app.config.server, round_timeout=timeout)
                asked = replace(app.config, rounds=num_rounds, server=server)
                evaluation = ServerEvaluation(evaluate_fn, layout_of(initial_arrays, frozen=app.frozen))
                run = app.opened(asked, initial_arrays, evaluation, simulated=simulated, held=held)
            transport = app.transport(grid, run, evaluation.layout, train_config, held)
            training = app.training(run, evaluation, transport)
            with Interruptible(run.folder, f'resume=True, output_dir="{run.folder.path}"'):
                outcome = training.run()
                app.close(run, outcome, evaluation.layout)
        self.outcome = outcome
        result.arrays = evaluation.layout.record(outcome.model.params)
        result.evaluate_metrics_serverapp.update(evaluation.found)
        return result

    def _refuse_overrides(self) -> None:
        """Raises ConfigError if a part of a round was replaced, by a subclass or on the object: nobody would call it,
        see `_refuse_part`."""
        for name, instead in INSTEAD.items():
            if getattr(getattr(self, name), "__func__", None) is not vars(DPFedAvg)[name]:
                raise ConfigError(
                    f"{name} must be DPFedAvg's own (got that of {type(self).__name__}), which is never called: "
                    f"{ITSELF}. Instead {instead}"
                )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Refused: see `_refuse_part`."""
        _refuse_part()

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Refused: see `_refuse_part`."""
        _refuse_part()

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Refused: see `_refuse_part`."""
        _refuse_part()

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Refused: see `_refuse_part`."""
        _refuse_part()


def _refuse_part() -> NoReturn:
    """A strategy around this one, or a loop of one's own, could send and add up what no ledger knows of."""
    raise NotImplementedError(f"{ITSELF}: call start, for a strategy around it could take them apart")


def _make_log_visible() -> None:
    """A ServerApp shows what it prints; an app that has not configured logging would see nothing of the rounds."""
    if not logger.hasHandlers():
        log_to(sys.stdout)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
