"""A run of somebody else's Flower app: its plan, the evaluation of its arrays, and the file that keeps them."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from dataclasses import replace

from flwr.app import ArrayRecord, MetricRecord
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from discreet.data.examples import TaskShape
from discreet.dpsgd.loop_plan import check_search
from discreet.flower.array_layout import ArrayLayout
from discreet.ledger.durable_ledger import LedgerError
from discreet.mechanisms.central_gaussian import count_stddev
from discreet.mechanisms.mechanism import expected_cohort
from discreet.queries.metric_answers import metric_blocks
from discreet.queries.query import Query
from discreet.queries.scores import EvaluationResult
from discreet.server.noise_outlook import check_noise
from discreet.server.plan import Plan, plan_of, resolve_noise
from discreet.server.resuming import same_settings
from discreet.server.run_folder import RunFolder, check_output, replace_file
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


def evaluation_by(
    evaluate_fn: EvaluateFn | None, found: dict[int, MetricRecord]
) -> Callable[[int, ArrayRecord], EvaluationResult]:
    """Evaluates the arrays after a round by the app's own function; what it says goes to `found`, by the round."""

    def evaluate(number: int, arrays: ArrayRecord) -> EvaluationResult:
        metrics = None if evaluate_fn is None else evaluate_fn(number, arrays)
        if metrics is not None:
            found[number] = metrics
        result = evaluation_result(metrics)
        if number == 1 and evaluate_fn is not None and result == evaluation_result(None):
            logger.warning("evaluate_fn gives no number whose name ends in loss, accuracy or acc: %s", UNSEEN)
        return result

    return evaluate


def planned_app(
    asked: Settings, arrays: ArrayRecord, layout: ArrayLayout, evaluate: Callable[[int, ArrayRecord], EvaluationResult]
) -> tuple[Plan, ArrayLayout]:
    """The plan of a run, and the layout with the values that it started with. The loss that it started with is the
    yardstick for one that runs away."""

    def plan(decided: Settings) -> Plan:
        query = RATED if decided.evaluation.private else None
        return plan_of(decided, asked=asked, num_params=layout.num_params, query=query)

    found = plan(same_settings(asked) if asked.resume else resolve_noise(asked, Sizes(layout.num_params)))
    check_search(found.clip, count_stddev(found.run) or 0.0, expected_cohort(found.run))
    folder = check_output(found.output, resume=found.resume)
    resumed = _read_arrays(folder, layout) if found.resume else None
    check_noise(found, lambda rounds: plan(resolve_noise(replace(asked, rounds=rounds))))
    started, loss = resumed or (layout, evaluate(0, arrays).loss)
    return found if loss is None else replace(found, chance_loss=loss), started


def keep_arrays(folder: RunFolder, layout: ArrayLayout, loss: float) -> None:
    """Writes what a run started with, unless it is there; a loss of infinity is one that is not known."""
    path = folder.arrays_path
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        metadata = {"layout": layout.described(), "loss": json.dumps(None if math.isinf(loss) else loss)}
        replace_file(path, save(dict(layout.kept), metadata=metadata))


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
