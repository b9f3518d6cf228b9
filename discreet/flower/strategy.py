"""DP-FedAvg as a Flower Strategy, for any Flower app on the Message API; the plan, evaluation and
file of its run."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NoReturn

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.superlink.grid import InMemoryGrid
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor

import discreet
from discreet.data.examples import TaskShape
from discreet.dpsgd.loop_plan import check_search
from discreet.flower.array_layout import ArrayLayout, FlowerMessages, TrainConfig, layout_of
from discreet.flower.grid_transport import GridTransport
from discreet.flower.masked_transport import MaskedTransport, members_of, transport_of
from discreet.flower.simulated_nodes import set_up_simulation
from discreet.flower.strategy_settings import (
    ARGUMENTS,
    EVALUATED,
    PrivateEvaluation,
    flower_settings,
    in_words_of_arguments,
)
from discreet.ledger.durable_ledger import LedgerError
from discreet.logs import log_to
from discreet.mechanisms.central_gaussian import count_stddev
from discreet.mechanisms.mechanism import Mechanism
from discreet.planning.noise_outlook import EXAMPLES_INSTEAD, FEW_CLIENTS, check_noise
from discreet.planning.plan import Plan, check_cost, check_room, resolve_noise
from discreet.planning.server_optimizer import ServerOptimizer
from discreet.planning.state import Outcome
from discreet.protocol.messages import VirtualClient
from discreet.queries.evaluation_result import EvaluationResult
from discreet.queries.metrics import metric_blocks
from discreet.queries.query import Query
from discreet.run_files.call import Call
from discreet.run_files.metrics_table import unrated
from discreet.run_files.opening import check_output, output_folder
from discreet.run_files.resuming import same_settings
from discreet.run_files.run_folder import RunFolder
from discreet.run_files.run_members import RunMembers
from discreet.run_files.whole_files import replace_file
from discreet.server.resolve import forbid_seed
from discreet.server.run_context import (
    RunContext,
    announce,
    close_run,
    interruptible,
    open_run,
    say_how_it_ended,
)
from discreet.server.training_run import OnRound, TrainingRun
from discreet.settings.privacy import Sizes
from discreet.settings.rules import ConfigError, plain, require
from discreet.settings.settings import Settings
from discreet.settings.training import FLOWER_APP

logger = logging.getLogger("discreet")

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]

# The query of federated evaluation in another app: one accuracy, whatever the examples are.
RATED = Query(metric_blocks(["accuracy"], TaskShape((1,), 2)))
UNREAD = "metrics and numbers of examples that clients report are not read: they are not private"
UNSEEN = (
    "no accuracy will be reported: give start an evaluate_fn, or the strategy private_evaluation"
)
OTHER_TURNS = (
    "a simulation whose clients take turns can't be resumed: Flower gives its nodes other numbers, "
    "and so other turns, at each start. Start it anew"
)
# In model.safetensors. Model and data are the app's own, so Discreet can't describe them.
METADATA = {"discreet": discreet.__version__, "model": FLOWER_APP, "data": FLOWER_APP}
PARTS = ("configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate")
ITSELF = (
    "DPFedAvg runs its rounds itself, as they are accounted: call start, whose train_config may "
    "be a function"
)


def _refuse_part(*_: object, **__: object) -> NoReturn:
    """Refuses to run a part of a round alone: a wrapping strategy or a custom loop could bypass the
    ledger."""
    raise NotImplementedError(ITSELF)


class DPFedAvg(Strategy):
    """DP-FedAvg, a replacement for `flwr.serverapp.strategy.FedAvg`. The clients and the server's
    call of `start` do not change.

        strategy = DPFedAvg(fraction_train=0.5, population_size=100, target_epsilon=8.0)
        result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=30)

    Guarantee: (epsilon, delta)-differential privacy of everything that one node holds (add or
    remove one node), against an observer who sees the models of all rounds but not who takes part.
    The server is trusted. Each round asks each node with probability `fraction_train`,
    independently. The server subtracts the arrays that it sent from those that come back, as one
    vector of all learned floats, and clips the difference to the L2 norm C_t. It sums the
    differences with equal weights, and noises the sum. A ledger in the run folder is charged before
    anything is released. Other contents of a reply (metrics, numbers of examples) are not read. A
    reply that is late, an error, or malformed counts as zero, and changes neither noise nor
    denominator.

    Args:
      fraction_train: the probability with which each node is in a round's cohort; a cohort may be
        empty.
      min_available_nodes: how many nodes must be connected before a round begins.
      arrayrecord_key: the key of the record with the arrays, in a message to a client.
      configrecord_key: that of the record with the config.
      population_size: the largest number of nodes, a public constant. The sum is divided by
        fraction_train * population_size, whoever replies, and no more nodes may be connected.
      target_epsilon: with `delta` and `clip_norm` short for
        mechanism=CentralGaussian(target_epsilon=..., delta=...,
        clipping=AdaptiveClipping(norm=clip_norm)).
      delta: by default 1e-5.
      clip_norm: without one the first rounds search for it.
      mechanism: `discreet.CentralGaussian`, `MaskedGaussian`, `CorrelatedNoise` or your own: noise,
        budget, clipping and accountant, instead of the three arguments above.
      population_name: the name of the population whose account the run charges; needs `account`.
      account: a file, made by `discreet ledger create`, that records what all runs over the
        population have spent. It is charged before the run's own ledger, and the budget of the
        mechanism then covers all runs together.
      sampling: "poisson"; "fixed", that share of the population without replacement; "everyone",
        with fraction_train=1; "cyclic", with mechanism=CorrelatedNoise(groups=...), which asks the
        nodes that are connected when the first round begins.
      server_optimizer: `discreet.ServerSGD(learning_rate, momentum)`, as FedAvgM; `ServerAdam(eta,
        beta_1, beta_2, tau)`, as FedAdam; or `ServerYogi`, as FedYogi. None: the step of FedAvg.
      frozen: patterns of names of arrays that stay at the server's value, such as "backbone.*".
      seed: None for secure randomness; a number is for tests in a simulation, and its noise
        protects nobody.
      private_evaluation: `discreet.PrivateEvaluation`: clients rate the model, and the mean of
        their answers is noised and accounted for; `evaluate_fn` is then left out. None: clients are
        not asked.
      on_round: a function that gets each round's row of metrics.csv, a dict, once the round is
        stored; a result of `private_evaluation` comes as a row of its own.
      output_dir: the run folder, which must not hold a run; by default one under outputs/, named by
        the time. A relative path is in the folder of the SuperLink; the log has the whole path.
      resume: resume the run in `output_dir` from its last checkpoint. The settings that decide
        privacy must not change.
      flower: the other arguments of `FedAvg`. They must be left out, None or 0: clients' reports
        are not private, all clients weigh the same, and no cohort is filled up. If every node is
        asked, `min_train_nodes` may be up to `min_available_nodes`.

    Raises:
      ConfigError: an argument that can't be honoured, in one line that names it.
      TypeError: there is no such argument.

    Source: McMahan et al. 2018 (arXiv 1710.06963), Algorithm 1; Andrew et al. 2021 (arXiv
    1905.03871), Algorithm 1.
    """

    def __init__(
        self,
        fraction_train: float = 1.0,
        *,
        min_available_nodes: int = 2,
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        population_size: int | None = None,
        target_epsilon: float | None = None,
        delta: float | None = None,
        clip_norm: float | None = None,
        mechanism: Mechanism | None = None,
        population_name: str | None = None,
        account: str | None = None,
        sampling: str = "poisson",
        server_optimizer: ServerOptimizer | None = None,
        frozen: Sequence[str] = (),
        seed: int | None = None,
        private_evaluation: PrivateEvaluation | None = None,
        on_round: OnRound | None = None,
        output_dir: str | None = None,
        resume: bool = False,
        **flower: Any,
    ) -> None:
        given = locals()
        self._refuse_overrides()
        with in_words_of_arguments():
            self.config = flower_settings(given)
            self.call = Call(output_dir, resume)
        self.on_round = on_round
        self.frozen = (frozen,) if isinstance(frozen, str) else tuple(frozen)
        self.keys = (arrayrecord_key, configrecord_key)
        if private_evaluation:
            self.metric = private_evaluation.metric
        else:
            self.metric = ""
        self.outcome: Outcome | None = None

    def summary(self) -> None:
        """Does nothing: `start` logs a summary once its folder is open."""

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
          initial_arrays: the arrays of the first round. A resumed run uses only their names, shapes
            and dtypes.
          num_rounds: the number of all rounds, including those before a resumption.
          timeout: seconds to wait for the replies of a round; a later reply counts as zero.
          train_config: sent to clients, with the number of the round; or a function from that
            number to it.
          evaluate_config: must be left out.
          evaluate_fn: gets the number of a round and its arrays, before the first round too, and
            must use the server's own data. Its result is logged and returned, and its loss is used
            to detect divergence.

        Returns:
          The arrays of the last round (the best ones if training diverged), and the results of
          `evaluate_fn` by round. Metrics of clients are never in it. `outcome` says if the run
          ended before its last round, and why.

        Raises:
          ConfigError, LedgerError: before any client is asked.
          MessagesTooLarge, TimeoutError: messages are refused, or too few nodes are connected; the
            completed rounds are kept.
        """
        self._refuse_overrides()
        _make_log_visible()
        result = Result()
        evaluate = evaluation_by(evaluate_fn, result.evaluate_metrics_serverapp)
        with ExitStack() as held:
            with in_words_of_arguments():
                _check_start(initial_arrays, train_config, evaluate_config)
                self._check_evaluation(evaluate_fn)
                server = replace(self.config.server, round_timeout=plain(timeout))
                asked = replace(self.config, rounds=plain(num_rounds), server=server)
                run, layout = self._opened(asked, grid, initial_arrays, evaluate, held)
            transport = self._transport(grid, run, layout, train_config or ConfigRecord(), held)
            query = run.plan.query
            logger.info("%s", UNREAD)
            if evaluate_fn is None and query is None:
                logger.warning("%s", UNSEEN)

            def after(number: int, params: Tensor) -> EvaluationResult:
                if query is not None:
                    return unrated(query.names())
                return evaluate(number, layout.record(params))

            with interruptible(run.folder, f'resume=True, output_dir="{run.folder.path}"'):
                self.outcome = TrainingRun(
                    run, transport=transport, evaluate=after, on_round=self.on_round
                ).run()
                result.arrays = layout.record(self.outcome.model.params)
                close_run(run, self.outcome, result.arrays.to_torch_state_dict(), METADATA)
                say_how_it_ended(run, self.outcome)
        return result

    def _opened(
        self,
        asked: Settings,
        grid: Grid,
        arrays: ArrayRecord,
        evaluate: Callable[[int, ArrayRecord], EvaluationResult],
        held: ExitStack,
    ) -> tuple[RunContext, ArrayLayout]:
        """The context of the run with its open folder, and the layout of its arrays."""
        simulated = isinstance(grid, InMemoryGrid)
        if not simulated:
            forbid_seed(asked.seed)
        layout = layout_of(arrays, frozen=self.frozen)
        plan, layout = planned_app(asked, self.call, arrays, layout, evaluate)
        params = layout.vector(arrays)
        run = open_run(plan, self.call, params=params, simulated=simulated, held=held)
        announce(run)
        keep_arrays(run.folder, layout, plan.chance_loss)
        return replace(run, names=ARGUMENTS), layout

    def _transport(
        self,
        grid: Grid,
        run: RunContext,
        layout: ArrayLayout,
        train_config: TrainConfig,
        held: ExitStack,
    ) -> GridTransport | MaskedTransport:
        """The transport to the app's clients; under secure aggregation that of masked sums."""
        plan = run.plan
        folder = run.folder.path
        if members_of(plan):
            masked = self.frozen
        else:
            masked = None
        members = RunMembers.of(plan, run.folder)
        if members is not None and members.numbers and isinstance(grid, InMemoryGrid):
            raise ConfigError(OTHER_TURNS)
        transport = GridTransport(
            grid,
            FlowerMessages(layout, train_config, self.keys, self.metric, masked),
            timeout=plan.round_timeout,
            population_size=plan.run.user.population_size,
            min_nodes=plan.min_nodes,
            in_every_round=True,
            names=ARGUMENTS,
            members=members,
        )
        if masked is None or not isinstance(grid, InMemoryGrid):
            return transport_of(plan, transport)
        ticket = set_up_simulation(folder, held, members=members_of(plan))
        numbers = dict[int, int]()
        return transport_of(
            plan,
            transport,
            lambda node: VirtualClient(numbers.setdefault(node, len(numbers)), str(folder), ticket),
        )

    def _check_evaluation(self, evaluate_fn: EvaluateFn | None) -> None:
        """Raises ConfigError if `evaluate_fn` is no function, or if both the server and the clients
        would rate the model."""
        given = evaluate_fn is None or callable(evaluate_fn)
        require(given, "evaluate_fn", "a function of the round and its arrays", evaluate_fn)
        private = self.config.evaluation.private
        rule = "omitted with private_evaluation: a row holds one accuracy"
        require(not (private and evaluate_fn), "evaluate_fn", rule, evaluate_fn)

    def _refuse_overrides(self) -> None:
        """Raises ConfigError if a subclass, or the object, replaces a part of a round, which would
        never be called."""
        for name in PARTS:
            own = getattr(getattr(self, name), "__func__", None) is _refuse_part
            require(
                own,
                name,
                f"DPFedAvg's own, for it is never called: {ITSELF}",
                f"that of {type(self).__name__}",
            )

    configure_train = aggregate_train = configure_evaluate = aggregate_evaluate = _refuse_part
    initialize_parameters = _refuse_part  # called by a server of Flower's first API


def _check_start(
    arrays: ArrayRecord, train_config: TrainConfig | None, evaluate_config: ConfigRecord | None
) -> None:
    """Raises ConfigError for arguments of `start` that have a wrong type, or would have no
    effect."""
    given = isinstance(arrays, ArrayRecord)
    require(given, "initial_arrays", "an ArrayRecord", type(arrays).__name__)
    omitted = f"omitted: {EVALUATED}"
    require(not evaluate_config, "evaluate_config", omitted, evaluate_config)
    usable = (
        train_config is None or callable(train_config) or isinstance(train_config, ConfigRecord)
    )
    rule = "a ConfigRecord, or a function of the round that gives one"
    require(usable, "train_config", rule, type(train_config).__name__)


def _make_log_visible() -> None:
    """Makes the log visible: a ServerApp shows only printed text, so an app without a configured
    log would not see the rounds."""
    if not logger.hasHandlers():
        log_to(sys.stdout)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


def evaluation_by(
    evaluate_fn: EvaluateFn | None, found: dict[int, MetricRecord]
) -> Callable[[int, ArrayRecord], EvaluationResult]:
    """Evaluates the arrays after a round by the app's own function; its result is stored in `found`
    by round. Loss and accuracy are the first numbers whose names end in `loss`, and in `accuracy`
    or `acc`."""

    def evaluate(number: int, arrays: ArrayRecord) -> EvaluationResult:
        if evaluate_fn is None:
            metrics = None
        else:
            metrics = evaluate_fn(number, arrays)
        kind = type(metrics).__name__
        require(
            metrics is None or isinstance(metrics, Mapping),
            "evaluate_fn",
            "a function that gives a MetricRecord",
            kind,
        )
        if metrics is not None:
            found[number] = metrics
        numbers = {
            name.lower(): each
            for name, each in (metrics or {}).items()
            if isinstance(each, int | float)
        }
        loss, accuracy = (
            next((float(value) for name, value in numbers.items() if name.endswith(ends)), None)
            for ends in ("loss", ("accuracy", "acc"))
        )
        if number == 1 and evaluate_fn is not None and loss is None and accuracy is None:
            logger.warning(
                "evaluate_fn gives no number whose name ends in loss, accuracy or acc: %s", UNSEEN
            )
        return EvaluationResult(loss, {"accuracy": accuracy})

    return evaluate


def planned_app(
    asked: Settings,
    call: Call,
    arrays: ArrayRecord,
    layout: ArrayLayout,
    evaluate: Callable[[int, ArrayRecord], EvaluationResult],
) -> tuple[Plan, ArrayLayout]:
    """The plan of a run, with its initial loss as reference, and the layout with its initial
    values."""

    def plan(decided: Settings) -> Plan:
        if decided.evaluation.private:
            query = RATED
        else:
            query = None
        return Plan(decided, asked, num_params=layout.num_params, query=query)

    if call.resume:
        decided = same_settings(asked, RunFolder(output_folder(call.output_dir)))
    else:
        decided = resolve_noise(asked, Sizes(layout.num_params))
    found = plan(decided)
    if asked.population_size < FEW_CLIENTS:
        advice = f"; {EXAMPLES_INSTEAD}"
    else:
        advice = ""
    check_search(found.clip, count_stddev(found.run) or 0.0, found.denominator, advice=advice)
    check_cost(found)
    check_room(found)
    folder = check_output(call)
    resumed = None
    if call.resume:
        resumed = _read_arrays(folder, layout)
    else:
        check_noise(found, lambda rounds: plan(resolve_noise(replace(asked, rounds=rounds))))
    started, loss = resumed or (layout, evaluate(0, arrays).loss)
    return found if loss is None else replace(found, chance_loss=loss), started


def keep_arrays(folder: RunFolder, layout: ArrayLayout, loss: float) -> None:
    """Writes the initial values and loss of a run, unless they are there. An unknown loss is
    written as infinity."""
    path = folder.arrays_path
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        metadata = {
            "layout": layout.described(),
            "loss": json.dumps(None if math.isinf(loss) else loss),
        }
        replace_file(path, save(dict(layout.kept), metadata=metadata))


def _read_arrays(folder: RunFolder, layout: ArrayLayout) -> tuple[ArrayLayout, float | None] | None:
    """The layout with the run's initial values, and its initial loss; None if the run ended before
    they were written. Raises ConfigError: the run has other arrays; LedgerError: the file is
    damaged.
    """
    path = folder.arrays_path
    if not path.exists():
        if folder.checkpoint_path.exists():
            raise LedgerError(
                f"{path} is missing: put back the one that belongs to the checkpoint beside it"
            )
        return None
    try:
        with safe_open(path, framework="np") as file:
            facts = file.metadata()
            kept = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if facts["layout"] != layout.described():
            raise ConfigError(
                "initial_arrays must have the names, shapes, dtypes and frozen arrays of "
                f"{folder.path}"
            )
        return ArrayLayout(layout.parts, kept), json.loads(facts["loss"])
    except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise LedgerError(f"{path} is damaged: {error}") from error
