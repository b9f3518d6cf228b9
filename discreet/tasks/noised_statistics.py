"""How a server reads what clients answer about their data: statistics, each with its standard error."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from discreet.tasks.bounded_answers import Block
from discreet.tasks.noised_means import Estimate, Noise, NoisedBlock, noised_blocks, quantile, root_of
from discreet.tasks.normalising import Normaliser
from discreet.tasks.statistic_answers import VALUE_BINS, DataShape
from discreet.tasks.targets import LABELS, NUMBERS

LEAST_DEVIATION = 0.01  # of a column, over half of its range: what does not vary at all is not blown up
QUARTILES = (0.25, 0.5, 0.75)

Row = dict[str, Estimate]


def read_statistics(
    blocks: Sequence[Block], mean: Tensor, noise: Noise, *, shape: DataShape, shares: Sequence[float] = QUARTILES
) -> dict[str, Row]:
    """What the noised mean of clients' answers says of their data: for each statistic what it is of, and the estimate.

    mean, variance and deviation of each column, `column 1` and so on, in the units of the inputs; `quantile 0.5` and
    the other `shares`, to the nearest of 40 bins; share of each class or label, or mean of each number in its own
    units; examples of a client. All are those of the mean over clients, each with the same weight.

    Raises:
      ValueError: the mean has another length.
    """
    found: dict[str, Row] = {}
    for part in noised_blocks(blocks, mean, noise):
        if part.block.name == "quantiles":
            found |= {f"quantile {share:g}": _quantiles(part, shape, share) for share in shares}
        else:
            found |= _READ[part.block.name](part, shape)
    return found


def read_normaliser(blocks: Sequence[Block], mean: Tensor, noise: Noise, *, shape: DataShape) -> Normaliser:
    """Means and deviations that inputs can be divided by: a variance that is smaller than its standard error, or than
    that of a hundredth of half the range, counts as that large."""
    found, least = read_statistics(blocks, mean, noise, shape=shape), (LEAST_DEVIATION * _half(shape)) ** 2
    variances = [max(one.value, one.standard_error, least) for one in found["variance"].values()]
    return Normaliser(
        tuple(one.value for one in found["mean"].values()), tuple(math.sqrt(variance) for variance in variances)
    )


def _half(shape: DataShape) -> float:
    return (shape.high - shape.low) / 2


def _columns(shape: DataShape) -> list[str]:
    return [f"column {number}" for number in range(1, shape.columns + 1)]


def _moments(part: NoisedBlock, shape: DataShape) -> dict[str, Row]:
    middle, half, count = (shape.low + shape.high) / 2, _half(shape), shape.columns
    means, variances = Row(), Row()
    for place, name in enumerate(_columns(shape)):
        means[name] = part.estimate(partial(_line, place, half, middle), shape.low, shape.high)
        variances[name] = part.estimate(partial(_variance, place, count, half), 0.0, half**2)
    return {"mean": means, "variance": variances, "deviation": {name: root_of(one) for name, one in variances.items()}}


def _variance(place: int, count: int, half: float, mean: Tensor) -> Tensor:
    spread: Tensor = (mean[count + place] + 1) / 2 - mean[place].square()
    return spread * half**2


def _quantiles(part: NoisedBlock, shape: DataShape, share: float) -> Row:
    edges = torch.linspace(shape.low, shape.high, VALUE_BINS + 1, dtype=torch.float64)
    columns = part.columns(shape.columns)
    return {name: quantile(one, share, edges) for name, one in zip(_columns(shape), columns, strict=True)}


def _targets(part: NoisedBlock, shape: DataShape) -> dict[str, Row]:
    target, row = shape.task.target, Row()
    names = target.names or tuple(f"class {number}" for number in range(part.block.length))
    middle = 0.5 if target.kind == LABELS else 0.0  # what a client takes off
    ranges = zip(target.low, target.high, strict=True) if target.kind == NUMBERS else ((0.0, 1.0) for _ in names)
    for place, (name, (low, high)) in enumerate(zip(names, ranges, strict=True)):
        # Numbers are answered as -1..1, and shares as they are.
        unit, zero = ((high - low) / 2, (high + low) / 2) if target.kind == NUMBERS else (1.0, middle)
        row[name] = part.estimate(partial(_line, place, unit, zero), low, high)
    return {"target mean" if target.kind == NUMBERS else "share": row}


def _line(place: int, unit: float, zero: float, mean: Tensor) -> Tensor:
    return zero + unit * mean[place]


def _examples(part: NoisedBlock, shape: DataShape) -> dict[str, Row]:
    most = shape.most_examples
    one = part.estimate(lambda mean: mean[0] + most / 2, 0.0, float(most))
    return {"examples": {"a client": one}}


_READ: Mapping[str, Callable[[NoisedBlock, DataShape], dict[str, Row]]] = {
    "moments": _moments,
    "targets": _targets,
    "examples": _examples,
}
