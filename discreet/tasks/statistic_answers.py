"""What a client answers to what its data are like: the blocks, one for each statistic.

The columns of inputs (n, k) are their k numbers; of images (n, channels, height, width) they are the channels, in which
each pixel counts as a value. A client's own mean counts, not its number of examples: each client weighs the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from discreet.privacy.rules.objective import PADDING
from discreet.statistics_settings import STATISTICS
from discreet.tasks.bounded_answers import Block, bins_of, check_names, shares_of
from discreet.tasks.examples import TaskShape
from discreet.tasks.targets import CLASSES, LABELS, SEQUENCES

VALUE_BINS = 40  # of a column's public range, for its quantiles


@dataclass(frozen=True)
class DataShape:
    """What is public of the data that statistics are about.

    Attributes:
      task: what an example is.
      low, high: the range of all inputs; a value outside counts as the nearer end.
      most_examples: a client with more examples counts as one with so many.

    Raises:
      ValueError: there are no columns of numbers, the range is empty, or most_examples is below 1.
    """

    task: TaskShape
    low: float
    high: float
    most_examples: int = 1000

    def __post_init__(self) -> None:
        if self.task.num_tokens or len(self.task.input_shape) not in (1, 3):
            raise ValueError(f"statistics are of columns or of images, not of inputs {self.task.input_shape} of text")
        if not -math.inf < self.low < self.high < math.inf:
            raise ValueError(f"high must be above low, and both finite (got {self.high} and {self.low})")
        if self.most_examples < 1:
            raise ValueError(f"most_examples must be at least 1 (got {self.most_examples})")

    @property
    def columns(self) -> int:
        """How many columns the inputs have."""
        return self.task.input_shape[0]

    def centred(self, inputs: Tensor) -> Tensor:
        """Inputs (n, ...) as rows (m, columns) float64 in -1..1, which is low..high; NaN is the middle."""
        rows = inputs.double() if inputs.ndim == 2 else inputs.double().movedim(1, -1).reshape(-1, self.columns)
        share = (rows - self.low) / (self.high - self.low)
        return (share.clamp(0, 1) * 2 - 1).nan_to_num(0.0)


def statistic_blocks(names: Sequence[str], shape: DataShape) -> tuple[Block, ...]:
    """The blocks that statistics are read from, in their order.

    Raises:
      ValueError: a name is unknown or is given twice; it names the choices.
    """
    check_names(names, STATISTICS)
    return tuple(_BLOCKS[name](shape) for name in names)


def _moments(shape: DataShape) -> Block:
    """Of each column u in -1..1 the mean of u, then of each the mean of 2 u^2 - 1: all of them in -1..1."""

    def answer(inputs: Tensor, targets: Tensor) -> Tensor:
        rows = shape.centred(inputs)
        return torch.cat([rows.mean(dim=0), (2 * rows.square() - 1).mean(dim=0)])

    return Block("moments", 2 * shape.columns, math.sqrt(2 * shape.columns), answer)


def _quantiles(shape: DataShape) -> Block:
    """Of each column the shares of its values in equally wide bins of the range."""

    def answer(inputs: Tensor, targets: Tensor) -> Tensor:
        places = bins_of(shape.centred(inputs), -1.0, 1.0, VALUE_BINS)
        return shares_of(places, VALUE_BINS)

    return Block("quantiles", shape.columns * VALUE_BINS, math.sqrt(shape.columns), answer, shares=True)


def _targets(shape: DataShape) -> Block:
    """The share of examples of each class; of sequences, the mean over examples of the shares of their own positions;
    or of each label, or number in -1..1, the mean, labels less 1/2."""
    target, count = shape.task.target, shape.task.num_classes
    if target.kind == CLASSES:
        return Block("targets", count, 1.0, lambda _, targets: shares_of(targets[:, None], count), shares=True)
    if target.kind == SEQUENCES:
        return Block("targets", count, 1.0, lambda _, targets: _shares_of_positions(targets, count), shares=True)
    width, middle, largest = len(target.names), *((0.5, 0.5) if target.kind == LABELS else (0.0, 1.0))

    def answer(inputs: Tensor, targets: Tensor) -> Tensor:
        return (targets.double() - middle).nan_to_num(0.0).clamp(-largest, largest).mean(dim=0)

    return Block("targets", width, largest * math.sqrt(width), answer)


def _shares_of_positions(targets: Tensor, count: int) -> Tensor:
    """The mean over sequences (n, length) of the share of each class, (count,): zeros for one of padding alone."""
    counts = torch.stack([torch.bincount(row[row != PADDING], minlength=count) for row in targets]).double()
    return (counts / counts.sum(dim=1, keepdim=True).clamp(min=1)).mean(dim=0)


def _examples(shape: DataShape) -> Block:
    """How many examples a client has, of at most so many, less half of that."""
    most = shape.most_examples

    def answer(inputs: Tensor, targets: Tensor) -> Tensor:
        return torch.tensor([min(len(targets), most) - most / 2], dtype=torch.float64)

    return Block("examples", 1, most / 2, answer)


_BLOCKS: dict[str, Callable[[DataShape], Block]] = {
    "moments": _moments,
    "quantiles": _quantiles,
    "targets": _targets,
    "examples": _examples,
}
