"""What a client answers to how good a model is on its held-out examples: the blocks, for each kind of target.

A client's own mean counts, not its number of examples: each client weighs the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from discreet.tasks.bounded_answers import Block, Held, bins_of
from discreet.tasks.examples import TaskShape
from discreet.tasks.targets import CLASSES, LABELS, NUMBERS, Target

METRICS = {
    CLASSES: ("accuracy", "loss", "auc", "calibration", "clients"),
    LABELS: ("accuracy", "loss", "auc", "clients"),
    NUMBERS: ("mae", "rmse", "r2", "clients"),
}
SCORE_BINS, LARGEST_LOGIT = 32, 8.0  # of scores, in logits: half a logit each
CONFIDENCE_BINS = 10
CLIENT_BINS = 20
LARGEST_ERROR = 1.0  # of a number, where numbers are learned as -1..1: half of its public range


def metric_blocks(names: Sequence[str], shape: TaskShape) -> tuple[Block, ...]:
    """The blocks that metrics are read from, in their order.

    Raises:
      ValueError: a name is unknown for what is predicted, or is given twice; it names the choices.
    """
    kind = shape.target.kind
    known = [name for name in METRICS[kind] if name != "auc" or kind != CLASSES or shape.num_classes == 2]
    unknown = [name for name in names if name not in known]
    if unknown or not names or len({*names}) < len(names):
        why = f" ({unknown[0]} is none of them)" if unknown else ""
        raise ValueError(f"must be a list of different names of {', '.join(known)} if {kind} are predicted{why}")
    return tuple(_BLOCKS[name](shape) for name in names)


def largest_loss(shape: TaskShape) -> float:
    """At which the loss of an example is cut: twice that of a model that gives every class, or label, one chance."""
    return 2 * math.log(shape.num_classes if shape.target.kind == CLASSES else 2)


def half_ranges(target: Target) -> Tensor:
    """Of numbers, (k,) float64: what one unit of a model's output is in their own units."""
    return (torch.tensor(target.high, dtype=torch.float64) - torch.tensor(target.low, dtype=torch.float64)) / 2


def _right(held: Held) -> Tensor:
    """Whether each example, or each of its labels, is right; NaN is wrong."""
    if held.targets.ndim == 1:
        return (held.values.argmax(dim=1) == held.targets) & ~held.values.isnan().any(dim=1)
    return ((held.values >= 0) == (held.targets == 1)) & ~held.values.isnan()


def _accuracy(held: Held) -> float:
    return float(_right(held).double().mean())


def _accuracy_block(shape: TaskShape) -> Block:
    return Block("accuracy", 1, 0.5, lambda held: _centred(_accuracy(held), 1.0))


def _centred(value: float, high: float) -> Tensor:
    """A value in 0..high as one in -high/2..high/2; NaN, as of a model that gives NaN, is the worst, high."""
    value = high if math.isnan(value) else min(max(value, 0.0), high)
    return torch.tensor([value - high / 2], dtype=torch.float64)


def _loss_block(shape: TaskShape) -> Block:
    largest = largest_loss(shape)

    def answer(held: Held) -> Tensor:
        if held.targets.ndim == 1:
            each = functional.cross_entropy(held.values, held.targets, reduction="none")
        else:
            each = functional.binary_cross_entropy_with_logits(held.values, held.targets.double(), reduction="none")
        return _centred(float(each.nan_to_num(largest, posinf=largest).clamp(0, largest).mean()), largest)

    return Block("loss", 1, largest / 2, answer)


def _auc_block(shape: TaskShape) -> Block:
    """Of each score (of class 1, or of each label) a histogram of negatives and one of positives: shares of all."""
    columns = 1 if shape.target.kind == CLASSES else len(shape.target.names)

    def answer(held: Held) -> Tensor:
        classes = held.targets.ndim == 1
        logits = held.values[:, 1:2] - held.values[:, 0:1] if classes else held.values
        places = bins_of(logits, -LARGEST_LOGIT, LARGEST_LOGIT, SCORE_BINS)
        truth = held.targets.reshape(len(held.targets), -1).long()
        return _shares(places + SCORE_BINS * truth, 2 * SCORE_BINS)

    return Block("auc", columns * 2 * SCORE_BINS, math.sqrt(columns), answer, shares=True)


def _shares(places: Tensor, count: int) -> Tensor:
    """For each column of places (n, k) the share of rows at each of `count` places: (k * count,), norm <= sqrt(k)."""
    hot = functional.one_hot(places, count).double()
    return hot.mean(dim=0).reshape(-1)


def _calibration_block(shape: TaskShape) -> Block:
    """For each bin of confidence, the mean over examples of (confidence - right) if it falls there: L1 norm <= 1."""

    def answer(held: Held) -> Tensor:
        confidence = held.values.softmax(dim=1).max(dim=1).values.nan_to_num(1.0)
        gap = (confidence - _right(held).double()) / len(confidence)
        places = bins_of(confidence, 0.0, 1.0, CONFIDENCE_BINS)
        return torch.zeros(CONFIDENCE_BINS, dtype=torch.float64).index_add(0, places, gap)

    return Block("calibration", CONFIDENCE_BINS, 1.0, answer)


def _clients_block(shape: TaskShape) -> Block:
    """One of the bins of a client's own accuracy or mean absolute error is 1."""

    def answer(held: Held) -> Tensor:
        numbers = shape.target.kind == NUMBERS
        value = float(_errors(held).mean()) if numbers else _accuracy(held)
        return _shares(bins_of(torch.tensor([[value]]), 0.0, 1.0, CLIENT_BINS), CLIENT_BINS)

    return Block("clients", CLIENT_BINS, 1.0, answer, shares=True)


def _errors(held: Held) -> Tensor:
    """Absolute errors (n, k) where numbers are learned as -1..1, cut; an output beyond the range counts as its end."""
    return (held.values.clamp(-1, 1) - held.targets.double()).abs().nan_to_num(LARGEST_ERROR).clamp(0, LARGEST_ERROR)


def _mae_block(shape: TaskShape) -> Block:
    units = half_ranges(shape.target)
    largest = float(units.mean()) * LARGEST_ERROR
    return Block("mae", 1, largest / 2, lambda held: _centred(float((_errors(held) * units).mean()), largest))


def _rmse_block(shape: TaskShape) -> Block:
    units = half_ranges(shape.target)
    largest = float((units**2).mean()) * LARGEST_ERROR**2
    return Block("rmse", 1, largest / 2, lambda held: _centred(float((_errors(held) * units).square().mean()), largest))


def _r2_block(shape: TaskShape) -> Block:
    """Of each number the mean squared error and the mean square of the truth, both less 1/2, and the truth's mean."""

    def answer(held: Held) -> Tensor:
        truth = held.targets.double().clamp(-1, 1)
        parts = [_errors(held).square() - LARGEST_ERROR**2 / 2, truth.square() - 0.5, truth]
        return torch.cat([part.mean(dim=0) for part in parts])

    count = len(shape.target.names)
    return Block("r2", 3 * count, math.sqrt(count * (LARGEST_ERROR**4 / 4 + 0.25 + 1)), answer)


_BLOCKS: dict[str, Callable[[TaskShape], Block]] = {
    "accuracy": _accuracy_block,
    "loss": _loss_block,
    "auc": _auc_block,
    "calibration": _calibration_block,
    "clients": _clients_block,
    "mae": _mae_block,
    "rmse": _rmse_block,
    "r2": _r2_block,
}
