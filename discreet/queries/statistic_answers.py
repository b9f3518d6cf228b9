"""Statistics of clients' data: a client's block for each, and the estimates from the noised mean of
all clients' blocks. Each client has the same weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from discreet.data.examples import TaskShape
from discreet.data.targets import LABELS
from discreet.per_example.objective import PADDING
from discreet.queries.answers import (
    AnswerPart,
    Estimate,
    NoisedBlock,
    bins_of,
    quantile,
    root_of,
    shares_of,
)
from discreet.settings.data import NormaliserConfig

VALUE_BINS = 40  # of a column's public range, for its quantiles
QUARTILES = (0.25, 0.5, 0.75)
# Least standard deviation of a column, over half of its range, so that normalising does not blow up
# a constant column.
LEAST_DEVIATION = 0.01

Row = dict[str, Estimate]


@dataclass(frozen=True)
class DataShape:
    """The public facts of the data for statistics.

    The columns of inputs (n, k) are their k numbers; those of images (n, channels, height, width)
    are the channels, in which each pixel counts as a value.

    Attributes:
      task: the shape of an example and its target.
      low, high: the range of all inputs; a value outside counts as the nearer end.
      most_examples: a client with more examples counts as having this many.
    """

    task: TaskShape
    low: float
    high: float
    most_examples: int = 1000

    @property
    def columns(self) -> int:
        """The number of columns of the inputs."""
        return self.task.input_shape[0]

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return [f"column {number}" for number in range(1, self.columns + 1)]

    def centred(self, inputs: Tensor) -> Tensor:
        """Inputs (n, ...) as rows (m, columns) float64, low..high scaled to -1..1. NaN becomes the
        middle."""
        rows = inputs.double().movedim(1, -1).reshape(-1, self.columns)
        share = (rows - self.low) / (self.high - self.low)
        return (share.clamp(0, 1) * 2 - 1).nan_to_num(0.0)


def statistic_blocks(names: Sequence[str], shape: DataShape) -> tuple[AnswerPart, ...]:
    """The blocks of these statistics, in their order."""
    return tuple(_STATISTICS[name](shape) for name in names)


def normaliser_from(found: Mapping[str, Row], shape: DataShape) -> NormaliserConfig:
    """The normaliser from estimated means and variances. A variance is raised to its standard error
    if it is smaller, and to that of a standard deviation of 1 % of half the range."""
    least = (LEAST_DEVIATION * (shape.high - shape.low) / 2) ** 2
    variances = [max(one.value, one.standard_error, least) for one in found["variance"].values()]
    return NormaliserConfig(
        [one.value for one in found["mean"].values()], list(map(math.sqrt, variances))
    )


def _moments(shape: DataShape) -> AnswerPart:
    """The mean of each column u in -1..1, then the mean of 2 u^2 - 1 of each; all are in -1..1."""
    count = shape.columns
    middle = (shape.low + shape.high) / 2
    half = (shape.high - shape.low) / 2

    def answer(inputs: Tensor, targets: Tensor) -> Tensor:
        rows = shape.centred(inputs)
        return torch.cat([rows.mean(dim=0), (2 * rows.square() - 1).mean(dim=0)])

    def variance(part: NoisedBlock, place: int) -> Estimate:
        def read(mean: Tensor) -> Tensor:
            spread: Tensor = (mean[count + place] + 1) / 2 - mean[place].square()
            return spread * half**2

        return part.estimate(read, 0.0, half**2)

    def read(part: NoisedBlock) -> dict[str, Row]:
        means = [
            part.number(place, shape.low, shape.high, zero=middle, unit=half)
            for place in range(count)
        ]
        variances = [variance(part, place) for place in range(count)]
        rows = {
            "mean": means,
            "variance": variances,
            "deviation": [root_of(one) for one in variances],
        }
        return {what: dict(zip(shape.names, row, strict=True)) for what, row in rows.items()}

    return AnswerPart("moments", 2 * count, math.sqrt(2 * count), 2 * count, answer, read)


def _quantiles(shape: DataShape) -> AnswerPart:
    """For each column the histogram of its values, as shares, in equally wide bins of the range."""
    edges = torch.linspace(shape.low, shape.high, VALUE_BINS + 1, dtype=torch.float64)
    bound = math.sqrt(shape.columns)

    def answer(inputs: Tensor, targets: Tensor) -> Tensor:
        return shares_of(bins_of(shape.centred(inputs), -1.0, 1.0, VALUE_BINS), VALUE_BINS)

    def read(part: NoisedBlock) -> dict[str, Row]:
        """The quantiles. Each column's shares are a separate histogram, whose sum is at most 1."""
        block = replace(part.block, bound=1.0, l1_bound=1.0)
        histograms = [
            replace(part, block=block, mean=mean) for mean in part.mean.reshape(-1, VALUE_BINS)
        ]
        columns = list(zip(shape.names, histograms, strict=True))
        return {
            f"quantile {at:g}": {name: quantile(one, at, edges) for name, one in columns}
            for at in QUARTILES
        }

    return AnswerPart(
        "quantiles", shape.columns * VALUE_BINS, bound, bound**2, answer, read, shares=True
    )


def _targets(shape: DataShape) -> AnswerPart:
    """The means of labels, minus 1/2, or of numbers in -1..1. For classes see `_classes`."""
    target = shape.task.target
    if not target.names:
        return _classes(shape.task.num_classes)
    width = len(target.names)
    middle, largest = (0.5, 0.5) if target.kind == LABELS else (0.0, 1.0)
    bound = largest * math.sqrt(width)

    def answer(_: Tensor, targets: Tensor) -> Tensor:
        return (targets.double() - middle).nan_to_num(0.0).clamp(-largest, largest).mean(dim=0)

    def read(part: NoisedBlock) -> dict[str, Row]:
        if target.kind == LABELS:
            return {
                "share": {
                    name: part.number(at, 0.0, 1.0, zero=0.5)
                    for at, name in enumerate(target.names)
                }
            }
        ranges = enumerate(zip(target.names, target.low, target.high, strict=True))
        return {
            "target mean": {
                name: part.number(place, low, high, zero=(high + low) / 2, unit=(high - low) / 2)
                for place, (name, low, high) in ranges
            }
        }

    return AnswerPart("targets", width, bound, bound * math.sqrt(width), answer, read)


def _classes(count: int) -> AnswerPart:
    """The share of examples of each class. For sequences, the mean over examples of the shares
    among their own positions, zeros for a sequence of padding alone."""

    def answer(_: Tensor, targets: Tensor) -> Tensor:
        rows = targets.reshape(len(targets), -1)
        counts = (
            (functional.one_hot(rows.clamp(min=0), count) * (rows != PADDING).unsqueeze(2))
            .sum(dim=1)
            .double()
        )
        return (counts / counts.sum(dim=1, keepdim=True).clamp(min=1)).mean(dim=0)

    def read(part: NoisedBlock) -> dict[str, Row]:
        return {
            "share": {
                f"class {place}": part.number(place, 0.0, 1.0, zero=0.0) for place in range(count)
            }
        }

    return AnswerPart("targets", count, 1.0, 1.0, answer, read, shares=True)


def _examples(shape: DataShape) -> AnswerPart:
    """A client's number of examples, at most `most_examples`, minus half of that."""
    most = shape.most_examples

    def answer(_: Tensor, targets: Tensor) -> Tensor:
        return torch.tensor([min(len(targets), most) - most / 2], dtype=torch.float64)

    def read(part: NoisedBlock) -> dict[str, Row]:
        return {"examples": {"a client": part.number(0, 0.0, most, zero=most / 2)}}

    return AnswerPart("examples", 1, most / 2, most / 2, answer, read)


_STATISTICS: Mapping[str, Callable[[DataShape], AnswerPart]] = {
    "moments": _moments,
    "quantiles": _quantiles,
    "targets": _targets,
    "examples": _examples,
}
