"""What a client answers to how good a model is on its held-out examples. `values` are the model's outputs.

A client's own mean counts, not its number of examples: each client weighs the same. So does each example in a client's
mean: of a sequence, its own share of right positions and its own mean loss count, and one of padding alone has 0 of
both, so that no number of positions moves what another example adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from discreet.privacy.rules.objective import PADDING, cross_entropy
from discreet.tasks.bounded_answers import Block, bins_of, check_names, shares_of
from discreet.tasks.examples import TaskShape
from discreet.tasks.targets import CLASSES, LABELS, NUMBERS, SEQUENCES, Target

METRICS = {
    CLASSES: ("accuracy", "loss", "auc", "calibration", "clients"),
    LABELS: ("accuracy", "loss", "auc", "clients"),
    NUMBERS: ("mae", "rmse", "r2", "clients"),
    SEQUENCES: ("accuracy", "loss", "clients"),
}
SCORE_BINS, LARGEST_LOGIT = 32, 8.0  # of scores, in logits: half a logit each
CONFIDENCE_BINS, CLIENT_BINS = 10, 20
LARGEST_ERROR = 1.0  # of a number, where numbers are learned as -1..1: half of its public range


def metric_blocks(names: Sequence[str], shape: TaskShape) -> tuple[Block, ...]:
    """The blocks that metrics are read from, in their order.

    Raises:
      ValueError: a name is unknown for what is predicted, or is given twice; it names the choices.
    """
    kind = shape.target.kind
    check_names(names, METRICS[kind], when=f" if {kind} are predicted")
    return tuple(_BLOCKS[name](shape) for name in names)


def largest_loss(shape: TaskShape) -> float:
    """At which the loss of an example is cut: twice that of a model that gives every class, or label, one chance."""
    return 2 * math.log(shape.num_classes or 2)


def half_ranges(target: Target) -> Tensor:
    """Of numbers, (k,) float64: what one unit of a model's output is in their own units."""
    return (torch.tensor(target.high, dtype=torch.float64) - torch.tensor(target.low, dtype=torch.float64)) / 2


def _scalar(name: str, largest: float, value: Callable[[Tensor, Tensor], Tensor]) -> Block:
    """Of the mean of values in 0..largest, less the middle; NaN counts as the largest."""

    def answer(values: Tensor, targets: Tensor) -> Tensor:
        return value(values, targets).double().nan_to_num(largest).clamp(0, largest).mean().reshape(1) - largest / 2

    return Block(name, 1, largest / 2, answer)


def right_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Whether each example (n,), or each of its labels or positions (n, k), is right: padding never is. NaN is wrong,
    though argmax takes it for the largest value."""
    if targets.dtype == torch.int64:
        return (outputs.argmax(dim=1) == targets) & ~outputs.isnan().any(dim=1)
    return ((outputs >= 0) == (targets == 1)) & ~outputs.isnan()


def _rights(outputs: Tensor, targets: Tensor) -> Tensor:
    """`right_of`, but of a sequence (n,) the share of its positions that are right."""
    right = right_of(outputs, targets)
    if targets.dtype != torch.int64 or targets.ndim == 1:
        return right
    return right.sum(dim=1) / (targets != PADDING).sum(dim=1).clamp(min=1)


def _losses(outputs: Tensor, targets: Tensor) -> Tensor:
    if targets.dtype == torch.int64:
        return cross_entropy(outputs, targets)
    return functional.binary_cross_entropy_with_logits(outputs, targets.double(), reduction="none")


def _errors(outputs: Tensor, targets: Tensor) -> Tensor:
    """Absolute errors (n, k) where numbers are learned as -1..1, cut; an output beyond the range counts as its end."""
    return (outputs.clamp(-1, 1) - targets.double()).abs().nan_to_num(LARGEST_ERROR).clamp(0, LARGEST_ERROR)


def score_names(shape: TaskShape) -> tuple[str, ...]:
    """Of what the scores are that AUC is about: of class 1 of two, of each class against the rest, or of each label."""
    if shape.target.kind != CLASSES:
        return tuple(shape.target.names)
    return ("class 1",) if shape.num_classes == 2 else tuple(f"class {place}" for place in range(shape.num_classes))


def _auc(shape: TaskShape) -> Block:
    """Of each score a histogram of negatives and one of positives: shares of all.

    Of more than two classes an example is a positive of one class and a negative of all others. Negatives are
    multiplied by (classes - 1)^(-1/2), so that both kinds have the same part of the norm: the few positives get less
    noise than if all had the same weight, and a constant factor changes no share of negatives.
    """
    count, rest = len(score_names(shape)), shape.num_classes - 1
    several = shape.target.kind == CLASSES and count > 1

    def answer(outputs: Tensor, targets: Tensor) -> Tensor:
        if several:
            scores, positive = _against_rest(outputs), functional.one_hot(targets, count)
        else:
            scores, positive = outputs[:, 1:2] - outputs[:, 0:1] if targets.ndim == 1 else outputs, targets
        places = bins_of(scores, -LARGEST_LOGIT, LARGEST_LOGIT, SCORE_BINS)
        found = shares_of(places + SCORE_BINS * positive.reshape(len(targets), -1).long(), 2 * SCORE_BINS)
        return _scaled_negatives(found, 1 / math.sqrt(rest)) if several else found

    length = count * 2 * SCORE_BINS
    if several:
        return Block("auc", length, math.sqrt(2), answer, shares=True, total=1 + math.sqrt(rest))
    return Block("auc", length, math.sqrt(count), answer, shares=True)


def _against_rest(outputs: Tensor) -> Tensor:
    """The logit of each class's probability, (n, k), of logits (n, k)."""
    own = torch.eye(outputs.shape[1], dtype=torch.bool)
    return outputs - outputs.unsqueeze(1).masked_fill(own, -math.inf).logsumexp(dim=2)


def _scaled_negatives(shares: Tensor, factor: float) -> Tensor:
    kinds = shares.reshape(-1, 2, SCORE_BINS)
    return torch.stack([factor * kinds[:, 0], kinds[:, 1]], dim=1).reshape(-1)


def _gaps(outputs: Tensor, targets: Tensor) -> Tensor:
    """For each bin of confidence, the mean over examples of (confidence - right) if it falls there: L1 norm <= 1."""
    confidence = outputs.softmax(dim=1).max(dim=1).values.nan_to_num(1.0)
    gap = (confidence - right_of(outputs, targets).double()) / len(confidence)
    places = bins_of(confidence, 0.0, 1.0, CONFIDENCE_BINS)
    return torch.zeros(CONFIDENCE_BINS, dtype=torch.float64).index_add(0, places, gap)


def _clients(shape: TaskShape) -> Block:
    """One of the bins of a client's own accuracy, or mean absolute error, is 1."""
    own = _errors if shape.target.kind == NUMBERS else _rights

    def answer(outputs: Tensor, targets: Tensor) -> Tensor:
        value = own(outputs, targets).double().mean().reshape(1, 1)
        return shares_of(bins_of(value, 0.0, 1.0, CLIENT_BINS), CLIENT_BINS)

    return Block("clients", CLIENT_BINS, 1.0, answer, shares=True)


def _powers(shape: TaskShape, power: int) -> Block:
    """Of the mean of the errors, or of their squares, in the numbers' own units."""
    units = half_ranges(shape.target)
    largest = float((LARGEST_ERROR * units).pow(power).mean())
    name = "mae" if power == 1 else "rmse"
    return _scalar(name, largest, lambda said, truth: (_errors(said, truth) * units).pow(power).mean(dim=1))


def _r2(shape: TaskShape) -> Block:
    """Of each number the mean squared error and the mean square of the truth, both less 1/2, and the truth's mean."""

    def answer(outputs: Tensor, targets: Tensor) -> Tensor:
        truth = targets.double().clamp(-1, 1)
        parts = [_errors(outputs, targets).square() - LARGEST_ERROR**2 / 2, truth.square() - 0.5, truth]
        return torch.cat([part.mean(dim=0) for part in parts])

    count = len(shape.target.names)
    return Block("r2", 3 * count, math.sqrt(count * (LARGEST_ERROR**4 / 4 + 0.25 + 1)), answer)


_BLOCKS: dict[str, Callable[[TaskShape], Block]] = {
    "accuracy": lambda shape: _scalar("accuracy", 1.0, _rights),
    "loss": lambda shape: _scalar("loss", largest_loss(shape), _losses),
    "auc": _auc,
    "calibration": lambda shape: Block("calibration", CONFIDENCE_BINS, 1.0, _gaps, total=1.0),
    "clients": _clients,
    "mae": lambda shape: _powers(shape, 1),
    "rmse": lambda shape: _powers(shape, 2),
    "r2": _r2,
}
