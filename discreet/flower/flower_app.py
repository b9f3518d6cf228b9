"""A run of somebody else's Flower app: its plan, the evaluation of its arrays, and the file that keeps them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from discreet.data.examples import TaskShape
from discreet.flower.array_layout import ArrayLayout
from discreet.flower.strategy_settings import EVALUATED, check_search
from discreet.ledger.durable_ledger import LedgerError
from discreet.queries.metric_answers import metric_blocks
from discreet.queries.query import Query
from discreet.queries.scores import EvaluationResult, unrated
from discreet.server.noise_outlook import check_noise
from discreet.server.plan import Plan, plan_of, resolve_noise
from discreet.server.resuming import same_settings
from discreet.server.run_context import RunContext, open_run
from discreet.server.run_folder import RunFolder, check_output, replace_file
from discreet.server.session import check_secure
from discreet.server.state import State
from discreet.settings.privacy import Sizes
from discreet.settings.rules import ConfigError
from discreet.settings.settings import Settings

logger = logging.getLogger("discreet")

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]

# What clients of another app rate by: one accuracy, whatever their examples are.
RATED = Query(metric_blocks(["accuracy"], TaskShape((1,), 2)))
UNSEEN = (
    "nobody will see whether the model learns: give start an evaluate_fn, on data of the server's own, or the strategy "
    "private_evaluation=discreet.PrivateEvaluation(...), by which clients rate the model, noised and paid for"
)


def evaluation_result(metrics: MetricRecord | None) -> EvaluationResult:
    """Loss and accuracy among metrics: the first number whose name is or ends in `loss`, and in `accuracy` or `acc`.

    >>> evaluation_result(MetricRecord({"test_acc": 0.5, "num-examples": 10}))
    EvaluationResult(loss=None, scores={'accuracy': 0.5})
    """
    numbers = {name: value for name, value in (metrics or {}).items() if isinstance(value, int | float)}

    def ending(*ends: str) -> float | None:
        return next((float(value) for name, value in numbers.items() if name.lower().endswith(ends)), None)

    return EvaluationResult(ending("loss"), {"accuracy": ending("accuracy", "acc")})


@dataclass(eq=False)
class ServerEvaluation:
    """Evaluates with the app's own function, on data of the server, and remembers what it said."""

    evaluate_fn: EvaluateFn | None
    layout: ArrayLayout
    found: dict[int, MetricRecord] = field(default_factory=dict)

    def of(self, number: int, arrays: ArrayRecord) -> EvaluationResult:
        """Of the arrays after round `number`."""
        metrics = None if self.evaluate_fn is None else self.evaluate_fn(number, arrays)
        if metrics is not None:
            self.found[number] = metrics
        result = evaluation_result(metrics)
        if number == 1 and self.evaluate_fn is not None and result == evaluation_result(None):
            logger.warning("evaluate_fn gives no number whose name ends in loss, accuracy or acc: %s", UNSEEN)
        return result

    def after(self, query: Query | None) -> Callable[[State], EvaluationResult]:
        """Of the model after a round; says nothing if clients rate it instead."""
        logger.info("metrics and numbers of examples that clients report are not read: they are not private")
        if self.evaluate_fn is None and query is None:
            logger.warning("%s", UNSEEN)
        if query is not None:
            nothing = unrated(query.names())
            return lambda _: nothing
        return lambda state: self.of(state.round, self.layout.record(state.params))


def open_app(
    asked: Settings, arrays: ArrayRecord, evaluation: ServerEvaluation, *, simulated: bool, held: ExitStack
) -> RunContext:
    """The run whose settings are `asked`, with its folder open. `evaluation` gets the layout that the run started with;
    the loss that it started with is the yardstick for one that runs away."""
    if not simulated:
        check_secure(asked.seed)
    layout, num_params = evaluation.layout, evaluation.layout.num_params
    if asked.resume:
        plan = _plan(same_settings(asked), asked, num_params)
    else:
        plan = _plan(resolve_noise(asked, Sizes(num_params)), asked, num_params)
        check_search(plan)
    folder = check_output(plan.output, resume=plan.resume)
    resumed = _read_arrays(folder, layout) if plan.resume else None
    check_noise(plan, lambda rounds: _plan(resolve_noise(replace(asked, rounds=rounds)), asked, num_params))
    evaluation.layout, loss = resumed or (layout, evaluation.of(0, arrays).loss)
    plan = plan if loss is None else replace(plan, chance_loss=loss)
    run = open_run(plan, params=evaluation.layout.vector(arrays), simulated=simulated, held=held)
    if resumed is None:
        run.folder.arrays_path.parent.mkdir(exist_ok=True)
        metadata = {"layout": layout.described(), "loss": json.dumps(loss)}
        replace_file(run.folder.arrays_path, save(dict(layout.kept), metadata=metadata))
    return run


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
        raise ConfigError(f"evaluate_config must be left out: {EVALUATED}")


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
