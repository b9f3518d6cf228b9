"""Somebody else's Flower app, made private: its settings, its arrays, and the run that drives its clients."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.superlink.grid import InMemoryGrid
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

import discreet
from discreet.data.examples import TaskShape
from discreet.evaluation.private_evaluation import Unrated
from discreet.flower.array_layout import ArrayLayout
from discreet.flower.flower_messages import FlowerMessages
from discreet.flower.grid_transport import GridTransport
from discreet.flower.masked_transport import MaskedTransport, SumTerms
from discreet.flower.simulated_clients import set_up_simulation
from discreet.flower.strategy_settings import Says, check_search
from discreet.ledger.durable_ledger import LedgerError
from discreet.protocol.messages import VirtualClient
from discreet.queries.metric_answers import metric_blocks
from discreet.queries.query import Query
from discreet.server.noise_outlook import check_noise
from discreet.server.plan import Plan, plan_of, resolve_noise
from discreet.server.resuming import same_settings
from discreet.server.run_context import RunContext, close_run, open_run, say_how_it_ended
from discreet.server.run_folder import RunFolder, check_output, replace_file
from discreet.server.session import check_secure
from discreet.server.state import Outcome, State
from discreet.server.training_run import OnRound, TrainingRun
from discreet.settings.privacy import Sizes
from discreet.settings.rules import ConfigError
from discreet.settings.settings import Settings
from discreet.settings.training import FLOWER_APP

logger = logging.getLogger("discreet")

TrainConfig = ConfigRecord | Callable[[int], ConfigRecord]
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]

# What clients of another app rate by: one accuracy, whatever their examples are.
RATED = Query(metric_blocks(["accuracy"], TaskShape((1,), 2)))
UNSEEN = (
    "nobody will see whether the model learns: give start an evaluate_fn, on data of the server's own, or the strategy "
    "private_evaluation=discreet.PrivateEvaluation(...), by which clients rate the model, noised and paid for"
)


@dataclass(frozen=True)
class EvaluationResult:
    """The result of a server's own evaluation, if it has one: see `evaluation_result`."""

    loss: float | None = None
    accuracy: float | None = None

    @property
    def scores(self) -> dict[str, float | None]:
        """As a row of metrics.csv has them."""
        return {"accuracy": self.accuracy}


def evaluation_result(metrics: MetricRecord | None) -> EvaluationResult:
    """Loss and accuracy among metrics: the first number whose name is or ends in `loss`, and in `accuracy` or `acc`.

    >>> evaluation_result(MetricRecord({"test_acc": 0.5, "num-examples": 10}))
    EvaluationResult(loss=None, accuracy=0.5)
    """
    numbers = {name: value for name, value in (metrics or {}).items() if isinstance(value, int | float)}

    def ending(*ends: str) -> float | None:
        return next((float(value) for name, value in numbers.items() if name.lower().endswith(ends)), None)

    return EvaluationResult(ending("loss"), ending("accuracy", "acc"))


@dataclass(eq=False)
class ServerEvaluation:
    """Evaluates with the app's own function, on data of the server, and remembers what it said.

    Attributes:
      loss: of the arrays that the run started from, the yardstick for a loss that runs away; None if it is not known.
    """

    evaluate_fn: EvaluateFn | None
    layout: ArrayLayout
    loss: float | None = None
    found: dict[int, MetricRecord] = field(default_factory=dict)

    def of(self, number: int, arrays: ArrayRecord) -> EvaluationResult:
        """Of the arrays after round `number`."""
        metrics = None if self.evaluate_fn is None else self.evaluate_fn(number, arrays)
        if metrics is not None:
            self.found[number] = metrics
        return evaluation_result(metrics)

    def after(self, state: State) -> EvaluationResult:
        """Of the model after a round."""
        return self.of(state.round, self.layout.record(state.params))


@dataclass(frozen=True)
class FlowerApp:
    """Clients that have never heard of Discreet: they get arrays and a config, and return arrays.

    Attributes:
      config: of the run, but for the rounds and the timeout, which `start` gives.
      frozen: patterns of the arrays that stay as they are.
      arrays_key, config_key: of the records in a message.
      metric: by which clients rate models, if they do.
      on_round: gets the row of metrics.csv of each round; None if nobody wants it.
      says: names settings in a message as the strategy's arguments.
    """

    config: Settings
    frozen: tuple[str, ...] = ()
    arrays_key: str = "arrays"
    config_key: str = "config"
    metric: str = ""
    on_round: OnRound | None = None
    says: Says = str

    def opened(
        self, asked: Settings, arrays: ArrayRecord, evaluation: ServerEvaluation, *, simulated: bool, held: ExitStack
    ) -> RunContext:
        """The run whose configuration is `asked`, with its folder open. `evaluation` gets the layout and the loss that
        the run started with."""
        layout = evaluation.layout
        plan = self._resolved(asked, layout.num_params, simulated=simulated)
        folder = check_output(plan.output, resume=plan.resume)
        resumed = _read_arrays(folder, layout) if plan.resume else None
        check_noise(plan, lambda rounds: _plan(resolve_noise(replace(asked, rounds=rounds)), asked, layout.num_params))
        evaluation.layout, evaluation.loss = resumed or (layout, evaluation.of(0, arrays).loss)
        plan = plan if evaluation.loss is None else replace(plan, chance_loss=evaluation.loss)
        run = open_run(plan, params=evaluation.layout.vector(arrays), simulated=simulated, held=held)
        if resumed is None:
            _write_arrays(run.folder, layout, evaluation.loss)
        return replace(run, says=self.says)

    def _resolved(self, asked: Settings, num_params: int, *, simulated: bool) -> Plan:
        if not simulated:
            check_secure(asked.seed)
        if asked.resume:
            return _plan(same_settings(asked), asked, num_params)
        plan = _plan(resolve_noise(asked, Sizes(num_params)), asked, num_params)
        check_search(plan)
        return plan

    def transport(
        self, grid: Grid, run: RunContext, layout: ArrayLayout, train_config: TrainConfig | None, held: ExitStack
    ) -> GridTransport | MaskedTransport:
        """Asks the app's clients; under secure aggregation for masked vectors."""
        plan, folder, told = run.plan, run.folder.path, train_config or ConfigRecord()
        terms = SumTerms.of(plan)
        masked = None if terms is None else (terms.run, self.frozen)
        transport = GridTransport(
            grid,
            FlowerMessages(layout, told, self.arrays_key, self.config_key, self.metric, masked),
            timeout=plan.round_timeout,
            population_size=plan.run.user.population_size,
            min_nodes=plan.min_nodes,
            in_every_round=True,
            says=self.says,
        )
        if terms is None:
            return transport
        if not isinstance(grid, InMemoryGrid):
            return MaskedTransport(transport, terms)
        ticket, numbers = set_up_simulation(plan.run, folder, held), dict[int, int]()

        def virtual(node: int) -> VirtualClient:
            return VirtualClient(numbers.setdefault(node, len(numbers)), str(folder), ticket)

        return MaskedTransport(transport, terms, virtual)

    def training(
        self, run: RunContext, evaluation: ServerEvaluation, transport: GridTransport | MaskedTransport
    ) -> TrainingRun:
        """The rounds of the run."""
        logger.info("metrics and numbers of examples that clients report are not read: they are not private")
        query = run.plan.query
        if evaluation.evaluate_fn is None and query is None:
            logger.warning("%s", UNSEEN)
        nothing = Unrated(query.names()) if query else None
        after = evaluation.after if nothing is None else lambda _: nothing
        return TrainingRun(run, transport=transport, evaluate=after, on_round=self.on_round)

    def close(self, run: RunContext, outcome: Outcome, layout: ArrayLayout) -> None:
        """Writes what is left when the rounds are over."""
        metadata = {"discreet": discreet.__version__, "model": FLOWER_APP, "data": FLOWER_APP}
        close_run(run, outcome, layout.tensors(outcome.model.params), metadata)
        say_how_it_ended(run, outcome)


def _plan(decided: Settings, asked: Settings, num_params: int) -> Plan:
    query = RATED if decided.evaluation.private else None
    return plan_of(decided, asked=asked, num_params=num_params, query=query)


def refuse_evaluation(
    arrays: ArrayRecord, evaluate_config: ConfigRecord | None, evaluate_fn: EvaluateFn | None, *, private: bool
) -> None:
    """Raises ConfigError if `start` is given no arrays, or an evaluation that is not private."""
    if private and evaluate_fn is not None:
        raise ConfigError("evaluate_fn must be left out with private_evaluation: a row has place for one accuracy")
    if not isinstance(arrays, ArrayRecord):
        raise ConfigError(f"initial_arrays must be an ArrayRecord (got {type(arrays).__name__})")
    if evaluate_config:
        raise ConfigError(
            "evaluate_config must be left out: clients are not asked to evaluate, for what they would report is not "
            "private. Evaluate on data of the server's own by evaluate_fn"
        )


def _write_arrays(folder: RunFolder, layout: ArrayLayout, loss: float | None) -> None:
    """Writes what a resumed run needs beside its checkpoint: the arrays that stay, and the first loss."""
    folder.arrays_path.parent.mkdir(exist_ok=True)
    metadata = {"layout": layout.described(), "loss": json.dumps(loss)}
    replace_file(folder.arrays_path, save(layout.kept_tensors(), metadata=metadata))


def _read_arrays(folder: RunFolder, layout: ArrayLayout) -> tuple[ArrayLayout, float | None] | None:
    """The layout with the values that stay since the run began, and the loss; None if it ended before it began.

    Raises:
      ConfigError: the run has other arrays.
      LedgerError: the file is damaged.
    """
    path = folder.arrays_path
    if not path.exists():
        if folder.checkpoint_path.exists():
            raise LedgerError(f"{path} is missing: put back the one that belongs to the checkpoint beside it")
        return None
    try:
        with safe_open(path, framework="np") as file:
            facts, kept = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if facts["layout"] != layout.described():
            raise ConfigError(f"initial_arrays must have the names, shapes, dtypes and frozen arrays of {folder.path}")
        return ArrayLayout(layout.parts, kept), json.loads(facts["loss"])
    except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise LedgerError(f"{path} is damaged: {error}") from error
