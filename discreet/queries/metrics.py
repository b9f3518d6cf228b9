"""Metrics of a model: on public examples, by scikit-learn; and on clients' examples, by a client's
block for each metric and the estimates from the noised mean of all clients' blocks.

Each sequence counts with its own share of correct positions and its own mean loss, 0 for a sequence
of padding alone. So the number of positions of one example does not affect another's contribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from discreet.data.examples import Examples, TaskShape
from discreet.data.targets import CLASS, CLASSES, LABELS, NUMBERS, SEQUENCES, SURVIVAL, Target
from discreet.models.models import BATCH, outputs_of, write_parameters
from discreet.per_example.objective import PADDING, Loss, cross_entropy, trainable
from discreet.queries.answers import (
    UNKNOWN,
    Answer,
    AnswerPart,
    Estimate,
    NoisedBlock,
    bins_of,
    clamped,
    quantile,
    root_of,
    shares_of,
)
from discreet.queries.evaluation_result import EvaluationResult
from discreet.queries.own_metric import own_metric
from discreet.queries.survival import concordance, hazard_loss, risk_of, survived
from discreet.settings.data import own_metrics

# bins of scores, each half a logit wide
SCORE_BINS = 32
LARGEST_LOGIT = 8.0
CONFIDENCE_BINS = 10
CLIENT_BINS = 20
# of a number, in units of half its public range: numbers are learned as -1..1
LARGEST_ERROR = 1.0
UNEVEN = 1.2  # times the share of each class if all were equal
QUANTILES = {"clients_worst_tenth": 0.1, "clients_median": 0.5}


def metric_blocks(names: Sequence[str], shape: TaskShape) -> tuple[AnswerPart, ...]:
    """The blocks of these metrics, in their order. Raises ValueError, which lists the choices: a
    name is unknown for this kind of target, or appears twice; a function of one's own can't be
    imported."""
    own = {name: own_metric(name) for name in own_metrics(names)}
    known = metrics_of(shape.target.kind)
    unknown = [name for name in names if name not in (*known, *own)]
    if unknown or not names or len({*names}) < len(names):
        if unknown:
            why = f" ({unknown[0]} is none of them)"
        else:
            why = ""
        choices = f"{', '.join(known)} if {shape.target.kind} are predicted"
        raise ValueError(f"must be a list of different names of {choices}{why}")
    return tuple(
        _scalar(name, 1.0, own[name]) if name in own else _METRICS[name][1](shape) for name in names
    )


def metrics_of(kind: str) -> list[str]:
    """The names of the metrics of a kind of target."""
    return [name for name, (kinds, _) in _METRICS.items() if kind in kinds]


def _scalar(name: str, largest: float, value: Answer, root: bool = False) -> AnswerPart:
    """The mean of values in 0..largest, sent minus the middle of the range; NaN counts as the
    largest value. `root`: the estimate is the square root of the mean."""
    middle = largest / 2

    def answer(outputs: Tensor, targets: Tensor) -> Tensor:
        return (
            value(outputs, targets).double().nan_to_num(largest).clamp(0, largest).mean().reshape(1)
            - middle
        )

    def read(part: NoisedBlock) -> dict[str, Estimate]:
        mean = part.number(0, 0.0, 2 * middle, zero=middle)
        return {name: root_of(mean) if root else mean}

    return AnswerPart(name, 1, middle, middle, answer, read)


def _rights(outputs: Tensor, targets: Tensor) -> Tensor:
    """`right_of`; for sequences the share of correct positions, (n,)."""
    right = right_of(outputs, targets)
    if targets.dtype != torch.int64 or targets.ndim == 1:
        return right
    return right.sum(dim=1) / (targets != PADDING).sum(dim=1).clamp(min=1)


def _loss(shape: TaskShape) -> AnswerPart:
    """The loss, clamped at twice that of a model that gives all classes, or both values of a label,
    the same probability."""

    if shape.target.kind == SURVIVAL:
        return _scalar("loss", 2 * math.log(2) * shape.num_outputs, hazard_loss)

    def losses(outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.dtype == torch.int64:
            return cross_entropy(outputs, targets)
        return functional.binary_cross_entropy_with_logits(
            outputs, targets.double(), reduction="none"
        )

    return _scalar("loss", 2 * math.log(shape.num_classes or 2), losses)


def _errors(outputs: Tensor, targets: Tensor) -> Tensor:
    """Absolute errors (n, k) of numbers in -1..1, clamped. An output beyond the range counts as its
    end."""
    return (
        (outputs.clamp(-1, 1) - targets.double())
        .abs()
        .nan_to_num(LARGEST_ERROR)
        .clamp(0, LARGEST_ERROR)
    )


def _powers(name: str, power: int, shape: TaskShape) -> AnswerPart:
    """The mean of the absolute errors, or of their squares, in the numbers' own units. Errors are
    clamped at half of the public range."""
    high, low = (
        torch.tensor(bounds, dtype=torch.float64)
        for bounds in (shape.target.high, shape.target.low)
    )
    units = (high - low) / 2
    largest = float((LARGEST_ERROR * units).pow(power).mean())
    return _scalar(
        name,
        largest,
        lambda said, truth: (_errors(said, truth) * units).pow(power).mean(dim=1),
        root=power == 2,
    )


def _r2(shape: TaskShape) -> AnswerPart:
    """For each number the mean squared error and the mean square of the target, both minus 1/2, and
    the mean of the target."""
    count = len(shape.target.names)
    bound = math.sqrt(count * (LARGEST_ERROR**4 / 4 + 0.25 + 1))

    def answer(outputs: Tensor, targets: Tensor) -> Tensor:
        truth = targets.double().clamp(-1, 1)
        parts = [
            _errors(outputs, targets).square() - LARGEST_ERROR**2 / 2,
            truth.square() - 0.5,
            truth,
        ]
        return torch.cat([part.mean(dim=0) for part in parts])

    def spread_of(mean: Tensor) -> Tensor:
        spread: Tensor = mean.reshape(3, -1)[1] + 0.5 - mean.reshape(3, -1)[2] ** 2
        return spread

    def mean_r2(mean: Tensor) -> Tensor:
        return torch.mean(1 - (mean.reshape(3, -1)[0] + LARGEST_ERROR**2 / 2) / spread_of(mean))

    def read(part: NoisedBlock) -> dict[str, Estimate]:
        known = bool((spread_of(part.mean) > 0).all())
        return {"r2": part.estimate(mean_r2, -math.inf, 1.0) if known else UNKNOWN}

    return AnswerPart("r2", 3 * count, bound, bound * math.sqrt(3 * count), answer, read)


def _calibration(_: TaskShape) -> AnswerPart:
    """For each bin of confidence the sum of (confidence - correct) over its examples, divided by
    the number of all examples: L1 norm at most 1. The sum over bins is the overconfidence, and the
    sum of absolute values the expected calibration error."""

    def answer(outputs: Tensor, targets: Tensor) -> Tensor:
        confidence = outputs.softmax(dim=1).max(dim=1).values.nan_to_num(1.0)
        gap = (confidence - right_of(outputs, targets).double()) / len(confidence)
        places = bins_of(confidence, 0.0, 1.0, CONFIDENCE_BINS)
        return torch.zeros(CONFIDENCE_BINS, dtype=torch.float64).index_add(0, places, gap)

    def read(part: NoisedBlock) -> dict[str, Estimate]:
        return {
            "overconfidence": part.estimate(Tensor.sum, -1.0, 1.0),
            "calibration_error": _sum_of_sizes(part),
        }

    return AnswerPart("calibration", CONFIDENCE_BINS, 1.0, 1.0, answer, read)


def _sum_of_sizes(part: NoisedBlock) -> Estimate:
    """The sum of absolute values. As noise biases each upwards, the bias that it would have at the
    released value is subtracted. The remaining bias is at most 0.47 standard deviations each, and
    is included in the error."""
    ones = torch.ones_like(part.mean)
    stddev = part.error(ones) / math.sqrt(len(ones))
    if stddev == 0:
        return Estimate(min(float(part.mean.abs().sum()), 1.0), 0.0)
    sizes = part.mean.abs() / stddev
    density = torch.exp(-sizes.square() / 2) * math.sqrt(2 / math.pi)
    added = density - 2 * sizes * torch.special.ndtr(-sizes)
    value = float((sizes - added).sum()) * stddev
    return clamped(value, part.error(ones, more=0.47 * stddev * len(ones)), 0.0, 1.0)


def _clients(shape: TaskShape) -> AnswerPart:
    """A client's own accuracy, or mean absolute error in half ranges, as a one-hot histogram. The
    estimates are the mean and quantiles over clients; the worst tenth has the smallest accuracy or
    the largest error."""
    numbers = shape.target.kind == NUMBERS
    edges = torch.linspace(0, 1, CLIENT_BINS + 1, dtype=torch.float64)
    middles = (torch.arange(CLIENT_BINS, dtype=torch.float64) + 0.5) / CLIENT_BINS

    def answer(outputs: Tensor, targets: Tensor) -> Tensor:
        value = (_errors if numbers else _rights)(outputs, targets).double().mean().reshape(1, 1)
        return shares_of(bins_of(value, 0.0, 1.0, CLIENT_BINS), CLIENT_BINS)

    def read(part: NoisedBlock) -> dict[str, Estimate]:
        if float(part.mean.sum()) < 3 * part.stddev * math.sqrt(CLIENT_BINS):
            return dict.fromkeys(["clients_mean", *QUANTILES], UNKNOWN)
        mean = part.estimate(lambda mean: (mean * middles).sum() / mean.sum(), 0.0, 1.0)
        # standard error of a value that is known up to its bin
        within = edges[1] / math.sqrt(12)
        found = {
            "clients_mean": replace(mean, standard_error=math.hypot(mean.standard_error, within))
        }
        return found | {
            name: quantile(part, 1 - share if numbers else share, edges)
            for name, share in QUANTILES.items()
        }

    return AnswerPart("clients", CLIENT_BINS, 1.0, 1.0, answer, read, shares=True)


def _auc(shape: TaskShape) -> AnswerPart:
    """For each score a histogram of negatives and one of positives, as shares of all examples. The
    scores are those of class 1 of two classes, of each class against the rest, or of each label.

    With more than two classes an example is a positive of one class and a negative of all others.
    Negatives are multiplied by (classes - 1)^(-1/2), so that negatives and positives contribute
    equally to the norm. The few positives then get relatively less noise than with equal weights,
    and a constant factor does not change the shares among negatives.
    """
    names = shape.target.names
    rest = shape.num_classes - 1
    if not names:
        if rest == 1:
            names = ("class 1",)
        else:
            names = tuple(f"class {place}" for place in range(rest + 1))
    count = len(names)
    several = rest > 1

    def answer(outputs: Tensor, targets: Tensor) -> Tensor:
        if several:
            scores = _against_rest(outputs)
            positive = functional.one_hot(targets, count)
        else:
            if targets.ndim == 1:
                scores = outputs[:, 1:2] - outputs[:, 0:1]
            else:
                scores = outputs
            positive = targets
        places = bins_of(scores, -LARGEST_LOGIT, LARGEST_LOGIT, SCORE_BINS)
        found = shares_of(
            places + SCORE_BINS * positive.reshape(len(targets), -1).long(), 2 * SCORE_BINS
        )
        if several:
            found.view(count, 2, SCORE_BINS)[:, 0] *= 1 / math.sqrt(rest)
        return found

    bound, l1_bound = (
        (math.sqrt(2), 1 + math.sqrt(rest)) if several else (math.sqrt(count), float(count))
    )
    return AnswerPart(
        "auc", count * 2 * SCORE_BINS, bound, l1_bound, answer, _read_auc, shares=True, of=names
    )


def _against_rest(outputs: Tensor) -> Tensor:
    """The logit of each class's probability, (n, k), from logits (n, k)."""
    own = torch.eye(outputs.shape[1], dtype=torch.bool)
    return outputs - outputs.unsqueeze(1).masked_fill(own, -math.inf).logsumexp(dim=2)


def _read_auc(part: NoisedBlock) -> dict[str, Estimate]:
    """The mean AUC over the scores: the probability that a positive is in a higher bin than a
    negative, where ties count half."""

    def area(mean: Tensor) -> Tensor:
        negatives, positives = mean.reshape(-1, 2, SCORE_BINS).unbind(dim=1)
        below = negatives.cumsum(dim=1) - negatives / 2
        areas = (positives * below).sum(dim=1) / (positives.sum(dim=1) * negatives.sum(dim=1))
        return torch.mean(areas)

    return {"auc": part.estimate(area, 0.0, 1.0) if bool(both_kinds(part).all()) else UNKNOWN}


def both_kinds(part: NoisedBlock) -> Tensor:
    """True for each score with enough negatives and positives, (scores,). A total that noise alone
    could produce is too little to estimate shares of it."""
    totals = part.mean.reshape(-1, 2, SCORE_BINS).sum(dim=2)
    return (totals >= 3 * part.stddev * math.sqrt(SCORE_BINS)).all(dim=1)


# For each metric the kinds of target that it is defined for, and its block.
_METRICS: Mapping[str, tuple[Sequence[str], Callable[[TaskShape], AnswerPart]]] = {
    "accuracy": ((CLASSES, LABELS, SEQUENCES), lambda _: _scalar("accuracy", 1.0, _rights)),
    "loss": ((CLASSES, LABELS, SEQUENCES, SURVIVAL), _loss),
    "auc": ((CLASSES, LABELS), _auc),
    "calibration": ((CLASSES,), _calibration),
    "mae": ((NUMBERS,), lambda shape: _powers("mae", 1, shape)),
    "rmse": ((NUMBERS,), lambda shape: _powers("rmse", 2, shape)),
    "r2": ((NUMBERS,), _r2),
    "clients": ((CLASSES, LABELS, NUMBERS, SEQUENCES), _clients),
}


def right_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """True for each example (n,), or each label or position (n, k), that is predicted correctly.
    Padding and NaN never are, though argmax takes NaN for the largest value."""
    if targets.dtype == torch.int64:
        return (outputs.argmax(dim=1) == targets) & ~outputs.isnan().any(dim=1)
    return ((outputs >= 0) == (targets == 1)) & ~outputs.isnan()


def evaluation_on(
    model: nn.Module,
    examples: Examples,
    *,
    loss: Loss,
    target: Target,
    own: Sequence[str] = (),
) -> Callable[[int, Tensor], EvaluationResult]:
    """The evaluation of a model after a round with given parameters, (num_params,), by `evaluate`,
    and by metrics of one's `own`, `package.module:function`. Each call overwrites the parameters of
    `model`."""
    parameters = trainable(model)
    metrics = {name: own_metric(name) for name in own}
    uneven = target.kind == CLASSES and is_uneven(examples.targets)

    def evaluated(_: int, params: Tensor) -> EvaluationResult:
        write_parameters(parameters, params)
        found = evaluate(model, examples, loss=loss, target=target, uneven=uneven)
        if not metrics:
            return found
        outputs = outputs_of(model, examples.inputs)
        scores: dict[str, float | None] = {
            name: float(metric(outputs, examples.targets.cpu()).mean())
            for name, metric in metrics.items()
        }
        return replace(found, scores={**found.scores, **scores})

    return evaluated


@torch.no_grad()
def evaluate(
    model: nn.Module,
    examples: Examples,
    *,
    loss: Loss = cross_entropy,
    target: Target = CLASS,
    uneven: bool | None = None,
) -> EvaluationResult:
    """Mean loss and scores of `model` on `examples`, at least one, without gradients and in
    evaluation mode.

    Cross entropy is in nats. Classes and sequences have accuracy, the share of correct examples, or
    of correct positions that are not padding; imbalanced classes (`is_uneven`) also have
    balanced_accuracy and auc (`uneven_scores`). Labels have accuracy, the share of correct labels,
    and auc, the mean over the labels (NaN if every label is all 0 or all 1). Numbers have r2, and
    mae, the mean absolute error in their own units; both are means over the numbers. Survival has
    concordance (`discreet.queries.survival`).

    It runs on the device of the model's parameters and restores the model's training mode. Outputs
    that are not finite make the loss NaN or infinite; an example with a NaN among its logits counts
    as wrong. `uneven`: True for imbalanced classes, if it is known.
    """
    total = 0.0
    right = 0
    counted = 0
    kept = []
    if uneven is None:
        uneven = target.kind == CLASSES and is_uneven(examples.targets)
    inputs_by_batch = torch.split(examples.inputs, BATCH)
    targets_by_batch = torch.split(examples.targets.cpu(), BATCH)
    for inputs, targets in zip(inputs_by_batch, targets_by_batch, strict=True):
        outputs = outputs_of(model, inputs)
        total += (
            loss(outputs.double(), targets.double() if targets.is_floating_point() else targets)
            .sum()
            .item()
        )
        if target.kind in (LABELS, NUMBERS, SURVIVAL) or uneven:
            kept.append(outputs)  # not of sequences, which might have too many
        if target.kind not in (NUMBERS, SURVIVAL):
            right += int(right_of(outputs, targets).sum())
            counted += int((targets != PADDING).sum())
    scores = dict[str, float]()
    if target.kind not in (NUMBERS, SURVIVAL):
        scores["accuracy"] = right / counted if counted else math.nan
    if kept:
        scores |= _other_scores(torch.cat(kept), examples.targets.cpu(), target)
    return EvaluationResult(total / len(examples.targets), scores)


def _other_scores(outputs: Tensor, targets: Tensor, target: Target) -> dict[str, float]:
    """The scores that need all outputs at once: of labels, of numbers, or of uneven classes."""
    if target.kind == LABELS:
        return {"auc": mean_auc(outputs, targets)}
    if target.kind == NUMBERS:
        each = number_scores(target.in_units(outputs), target.in_units(targets))
        return {name: sum(one[name] for one in each) / len(each) for name in ("r2", "mae")}
    if target.kind == SURVIVAL:
        return {"concordance": concordance(risk_of(survived(outputs.double())), targets)}
    return uneven_scores(outputs, targets)


def is_uneven(targets: Tensor, num_classes: int = 2) -> bool:
    """True if one class has a share of the targets (n,) well above an equal share."""
    counts = torch.bincount(targets.cpu(), minlength=num_classes).double()
    return bool(len(targets)) and float(counts.max() / counts.sum()) > UNEVEN / max(2, len(counts))


def uneven_scores(outputs: Tensor, targets: Tensor) -> dict[str, float]:
    """The balanced accuracy (mean recall over the classes), and the mean AUC of each class against
    the rest (for two classes the AUC); a class without an example counts in neither. The AUC is NaN
    if an output is not finite."""
    classes = torch.unique(targets)
    right = right_of(outputs, targets).double()
    balanced = torch.stack([right[targets == each].mean() for each in classes]).mean()
    logits = outputs.double()
    if logits.shape[1] > 2:
        scores = _against_rest(logits)
    else:
        scores = logits - logits.flip(1)
    against = functional.one_hot(targets, logits.shape[1])[:, classes]
    if logits.isfinite().all():
        auc = mean_auc(scores[:, classes], against)
    else:
        auc = math.nan
    return {"balanced_accuracy": float(balanced), "auc": auc}


def mean_auc(outputs: Tensor, targets: Tensor) -> float:
    """The mean AUC of the labels (n, k) that have both 0 and 1; NaN if there are none, or if an
    output is NaN."""
    from sklearn.metrics import roc_auc_score

    both = (targets.min(dim=0).values < targets.max(dim=0).values).nonzero().flatten()
    if not len(both) or outputs.isnan().any():
        return math.nan
    finite = outputs.double().nan_to_num()  # keeps infinite values first and last in the order
    return float(roc_auc_score(targets[:, both].numpy(), finite[:, both].numpy(), average="macro"))


def number_scores(said: Tensor, truth: Tensor) -> list[dict[str, float]]:
    """R2 and the mean absolute error of each of k numbers, from predictions and targets (n, k) in
    their own units. NaN if a prediction is not finite, and R2 also for a single example. R2 for a
    constant target is 0, or 1 if the predictions are exact."""
    from sklearn.metrics import mean_absolute_error, r2_score

    if not said.isfinite().all():
        return [{"r2": math.nan, "mae": math.nan}] * said.shape[1]
    found = []
    for true, given in zip(truth.T.numpy(), said.T.numpy(), strict=True):
        if len(true) > 1:
            r2 = float(r2_score(true, given))
        else:
            r2 = math.nan
        found.append({"r2": r2, "mae": float(mean_absolute_error(true, given))})
    return found
