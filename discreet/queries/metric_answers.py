"""Metrics of a model by its outputs for a client's examples: a client's block of each, and the numbers that are read
from the noised mean of all clients' blocks.

Of a sequence, its own share of right positions and its own mean loss count, and one of padding alone has 0 of both, so
that no number of positions moves what another example adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from discreet.data.examples import TaskShape
from discreet.data.targets import CLASSES, KINDS, LABELS, NUMBERS, SEQUENCES
from discreet.per_example.objective import PADDING, cross_entropy
from discreet.queries.answers import (
    UNKNOWN,
    Answer,
    Block,
    Estimate,
    NoisedBlock,
    bins_of,
    cut,
    quantile,
    root_of,
    shares_of,
)
from discreet.queries.metrics import right_of

SCORE_BINS, LARGEST_LOGIT = 32, 8.0  # of scores, in logits: half a logit each
CONFIDENCE_BINS, CLIENT_BINS = 10, 20
LARGEST_ERROR = 1.0  # of a number, where numbers are learned as -1..1: half of its public range
QUANTILES = {"clients_worst_tenth": 0.1, "clients_median": 0.5}


def metric_blocks(names: Sequence[str], shape: TaskShape) -> tuple[Block, ...]:
    """The blocks that metrics are read from, in their order.

    Raises:
      ValueError: a name is unknown for what is predicted, or is given twice; it names the choices.
    """
    known = metrics_of(shape.target.kind)
    unknown = [name for name in names if name not in known]
    if unknown or not names or len({*names}) < len(names):
        why = f" ({unknown[0]} is none of them)" if unknown else ""
        choices = f"{', '.join(known)} if {shape.target.kind} are predicted"
        raise ValueError(f"must be a list of different names of {choices}{why}")
    return tuple(_METRICS[name][1](shape) for name in names)


def metrics_of(kind: str) -> list[str]:
    """The names of the metrics of a kind of target."""
    return [name for name, (kinds, _) in _METRICS.items() if kind in kinds]


def _scalar(name: str, largest: float, value: Answer, root: bool = False) -> Block:
    """The mean of values in 0..largest, sent less the middle; NaN counts as the largest. `root`: its root is read."""
    middle = largest / 2

    def answer(outputs: Tensor, targets: Tensor) -> Tensor:
        return value(outputs, targets).double().nan_to_num(largest).clamp(0, largest).mean().reshape(1) - middle

    def read(part: NoisedBlock) -> dict[str, Estimate]:
        mean = part.number(0, 0.0, 2 * middle, zero=middle)
        return {name: root_of(mean) if root else mean}

    return Block(name, 1, middle, middle, answer, read)


def _rights(outputs: Tensor, targets: Tensor) -> Tensor:
    """`right_of`, but of a sequence (n,) the share of its positions that are right."""
    right = right_of(outputs, targets)
    if targets.dtype != torch.int64 or targets.ndim == 1:
        return right
    return right.sum(dim=1) / (targets != PADDING).sum(dim=1).clamp(min=1)


def _loss(shape: TaskShape) -> Block:
    """The loss, cut at twice that of a model that gives every class, or label, one chance."""

    def losses(outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.dtype == torch.int64:
            return cross_entropy(outputs, targets)
        return functional.binary_cross_entropy_with_logits(outputs, targets.double(), reduction="none")

    return _scalar("loss", 2 * math.log(shape.num_classes or 2), losses)


def _errors(outputs: Tensor, targets: Tensor) -> Tensor:
    """Absolute errors (n, k) where numbers are learned as -1..1, cut; an output beyond the range counts as its end."""
    return (outputs.clamp(-1, 1) - targets.double()).abs().nan_to_num(LARGEST_ERROR).clamp(0, LARGEST_ERROR)


def _powers(name: str, power: int, shape: TaskShape) -> Block:
    """The mean of the errors, or of their squares, in the numbers' own units, cut at half of the public range."""
    high, low = (torch.tensor(bounds, dtype=torch.float64) for bounds in (shape.target.high, shape.target.low))
    units = (high - low) / 2
    largest = float((LARGEST_ERROR * units).pow(power).mean())
    return _scalar(
        name, largest, lambda said, truth: (_errors(said, truth) * units).pow(power).mean(dim=1), root=power == 2
    )


def _r2(shape: TaskShape) -> Block:
    """For each number the mean squared error and the mean square of the truth, both less 1/2, and the truth's mean."""
    count = len(shape.target.names)
    bound = math.sqrt(count * (LARGEST_ERROR**4 / 4 + 0.25 + 1))

    def answer(outputs: Tensor, targets: Tensor) -> Tensor:
        truth = targets.double().clamp(-1, 1)
        parts = [_errors(outputs, targets).square() - LARGEST_ERROR**2 / 2, truth.square() - 0.5, truth]
        return torch.cat([part.mean(dim=0) for part in parts])

    def spread_of(mean: Tensor) -> Tensor:
        spread: Tensor = mean.reshape(3, -1)[1] + 0.5 - mean.reshape(3, -1)[2] ** 2
        return spread

    def mean_r2(mean: Tensor) -> Tensor:
        return torch.mean(1 - (mean.reshape(3, -1)[0] + LARGEST_ERROR**2 / 2) / spread_of(mean))

    def read(part: NoisedBlock) -> dict[str, Estimate]:
        known = bool((spread_of(part.mean) > 0).all())
        return {"r2": part.estimate(mean_r2, -math.inf, 1.0) if known else UNKNOWN}

    return Block("r2", 3 * count, bound, bound * math.sqrt(3 * count), answer, read)


def _calibration(_: TaskShape) -> Block:
    """For each bin of confidence, the mean over examples of (confidence - right) if it falls there: L1 norm <= 1. The
    sum is overconfidence, and the sum of sizes the expected calibration error."""

    def answer(outputs: Tensor, targets: Tensor) -> Tensor:
        confidence = outputs.softmax(dim=1).max(dim=1).values.nan_to_num(1.0)
        gap = (confidence - right_of(outputs, targets).double()) / len(confidence)
        places = bins_of(confidence, 0.0, 1.0, CONFIDENCE_BINS)
        return torch.zeros(CONFIDENCE_BINS, dtype=torch.float64).index_add(0, places, gap)

    def read(part: NoisedBlock) -> dict[str, Estimate]:
        return {"overconfidence": part.estimate(Tensor.sum, -1.0, 1.0), "calibration_error": _sum_of_sizes(part)}

    return Block("calibration", CONFIDENCE_BINS, 1.0, 1.0, answer, read)


def _sum_of_sizes(part: NoisedBlock) -> Estimate:
    """The sum of absolute values. Noise makes them larger: of each is taken what noise would add to it, if it were as
    large as was released; what is left of that bias is at most 0.47 standard deviations each, and is in the error."""
    ones = torch.ones_like(part.mean)
    stddev = part.error(ones) / math.sqrt(len(ones))
    if stddev == 0:
        return Estimate(min(float(part.mean.abs().sum()), 1.0), 0.0)
    sizes = part.mean.abs() / stddev
    density = torch.exp(-sizes.square() / 2) * math.sqrt(2 / math.pi)
    added = density - 2 * sizes * torch.special.ndtr(-sizes)
    value = float((sizes - added).sum()) * stddev
    return cut(value, part.error(ones, more=0.47 * stddev * len(ones)), 0.0, 1.0)


def _clients(shape: TaskShape) -> Block:
    """A client's own accuracy, or mean absolute error in half ranges, as one of its bins that is 1. Read are the mean
    and quantiles over clients; the worst tenth has the smallest accuracy or the largest error."""
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
        within = edges[1] / math.sqrt(12)  # a value is known to its bin
        found = {"clients_mean": replace(mean, standard_error=math.hypot(mean.standard_error, within))}
        return found | {
            name: quantile(part, 1 - share if numbers else share, edges) for name, share in QUANTILES.items()
        }

    return Block("clients", CLIENT_BINS, 1.0, 1.0, answer, read, shares=True)


def _auc(shape: TaskShape) -> Block:
    """For each score a histogram of negatives and one of positives: shares of all. Scores are of class 1 of two, of
    each class against the rest, or of each label.

    Of more than two classes an example is a positive of one class and a negative of all others. Negatives are
    multiplied by (classes - 1)^(-1/2), so that both kinds have the same part of the norm: the few positives get less
    noise than if all had the same weight, and a constant factor changes no share of negatives.
    """
    names, rest = shape.target.names, shape.num_classes - 1
    if not names:
        names = ("class 1",) if rest == 1 else tuple(f"class {place}" for place in range(rest + 1))
    count, several = len(names), rest > 1

    def answer(outputs: Tensor, targets: Tensor) -> Tensor:
        if several:
            scores, positive = _against_rest(outputs), functional.one_hot(targets, count)
        else:
            scores, positive = outputs[:, 1:2] - outputs[:, 0:1] if targets.ndim == 1 else outputs, targets
        places = bins_of(scores, -LARGEST_LOGIT, LARGEST_LOGIT, SCORE_BINS)
        found = shares_of(places + SCORE_BINS * positive.reshape(len(targets), -1).long(), 2 * SCORE_BINS)
        if several:
            found.view(count, 2, SCORE_BINS)[:, 0] *= 1 / math.sqrt(rest)
        return found

    bound, l1_bound = (math.sqrt(2), 1 + math.sqrt(rest)) if several else (math.sqrt(count), math.sqrt(count) ** 2)
    return Block("auc", count * 2 * SCORE_BINS, bound, l1_bound, answer, _read_auc, shares=True, of=names)


def _against_rest(outputs: Tensor) -> Tensor:
    """The logit of each class's probability, (n, k), of logits (n, k)."""
    own = torch.eye(outputs.shape[1], dtype=torch.bool)
    return outputs - outputs.unsqueeze(1).masked_fill(own, -math.inf).logsumexp(dim=2)


def _read_auc(part: NoisedBlock) -> dict[str, Estimate]:
    """The mean over the scores of the chance that a positive is in a higher bin than a negative, ties by half."""

    def area(mean: Tensor) -> Tensor:
        negatives, positives = mean.reshape(-1, 2, SCORE_BINS).unbind(dim=1)
        below = negatives.cumsum(dim=1) - negatives / 2
        areas = (positives * below).sum(dim=1) / (positives.sum(dim=1) * negatives.sum(dim=1))
        return torch.mean(areas)

    return {"auc": part.estimate(area, 0.0, 1.0) if bool(both_kinds(part).all()) else UNKNOWN}


def both_kinds(part: NoisedBlock) -> Tensor:
    """True for each score with enough negatives and positives, (scores,): with as little of a kind as noise makes of
    nothing, a share of it is no number to rely on."""
    totals = part.mean.reshape(-1, 2, SCORE_BINS).sum(dim=2)
    return (totals >= 3 * part.stddev * math.sqrt(SCORE_BINS)).all(dim=1)


# The kinds of target that a metric is of, and its block.
_METRICS: Mapping[str, tuple[Sequence[str], Callable[[TaskShape], Block]]] = {
    "accuracy": ((CLASSES, LABELS, SEQUENCES), lambda _: _scalar("accuracy", 1.0, _rights)),
    "loss": ((CLASSES, LABELS, SEQUENCES), _loss),
    "auc": ((CLASSES, LABELS), _auc),
    "calibration": ((CLASSES,), _calibration),
    "mae": ((NUMBERS,), lambda shape: _powers("mae", 1, shape)),
    "rmse": ((NUMBERS,), lambda shape: _powers("rmse", 2, shape)),
    "r2": ((NUMBERS,), _r2),
    "clients": (KINDS, _clients),
}
