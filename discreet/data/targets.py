"""The target of an example: its class, any number of labels, numbers in public ranges, a class for
each position of a sequence, or the time until an event."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from discreet.data.cell_reading import CellError
from discreet.per_example.objective import PADDING

logger = logging.getLogger("discreet")

Array = np.ndarray[Any, Any]

CLASSES = "classes"
LABELS = "labels"
NUMBERS = "numbers"
SEQUENCES = "sequences"
SURVIVAL = "survival"
KINDS = (CLASSES, LABELS, NUMBERS, SEQUENCES, SURVIVAL)


class FolderError(ValueError):
    """Data in a folder are missing, unreadable, or do not fit. The message contains no value of the
    data."""


@dataclass(frozen=True)
class Target:
    """The kind of target of an example, and its public ranges.

    Attributes:
      kind: classes (one of several), labels (each of several holds or does not), numbers,
        sequences (one of several classes at each position that is not padding), or survival (the
        interval of an event, if it was seen: `discreet.queries.survival`).
      names: the names of the labels, numbers or intervals, at least one; none for classes.
      low, high: the public range of each number, or the start and end of each interval. A model
        learns low..high as -1..1. A value outside is clamped, because its distance from the range
        must not be revealed.
      length: the number of positions of a sequence, including padding; 0 for other kinds.

    >>> price = Target(NUMBERS, ("price",), (0.0,), (200.0,))
    >>> price.scaled(torch.tensor([[50.0], [900.0]])).tolist()
    [[-0.5], [1.0]]
    >>> price.in_units(torch.tensor([[-0.5]])).tolist()
    [[50.0]]
    """

    kind: str = CLASSES
    names: tuple[str, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    length: int = 0

    def scaled(self, values: Tensor) -> Tensor:
        """Numbers (n, k) in their own units, scaled for a model: float32 in -1..1."""
        low, high = self._range()
        share: Tensor = (values.double() - low) / (high - low)
        return (share.clamp(0, 1) * 2 - 1).float()

    def in_units(self, outputs: Tensor) -> Tensor:
        """The inverse of `scaled`, float64; values beyond -1..1 are not clamped."""
        low, high = self._range()
        return low + (outputs.double() + 1) / 2 * (high - low)

    def _range(self) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.low, dtype=torch.float64), torch.tensor(
            self.high, dtype=torch.float64
        )


CLASS = Target()


def targets_of(
    values: Array, target: Target, *, num_classes: int, what: str, padding: int = PADDING
) -> Tensor:
    """Targets in the form of `Examples`: class numbers (n,) int64, or (n, length) for sequences,
    with `PADDING` where a value is `padding`; otherwise (n, k) float32, labels as 0 and 1, numbers
    scaled. `values` are (n,), or (n, k) for labels and numbers; `what` names them in errors. Raises
    FolderError: a target is missing or invalid."""
    if target.kind in (CLASSES, SEQUENCES):
        return _class_numbers(
            values, target.length, num_classes=num_classes, padding=padding, what=what
        )
    if values.dtype.kind in "fiub":
        columns = values.reshape(len(values), math.prod(values.shape[1:]))
    else:
        columns = np.zeros((0, 0))
    wanted = 2 if target.kind == SURVIVAL else len(target.names)
    if columns.shape[1] != wanted:
        raise FolderError(f"{what}: each row must have {wanted} targets: {', '.join(target.names)}")
    numbers = columns.astype(np.float64)
    if target.kind == SURVIVAL:
        return _intervals(numbers, target)
    _refuse_row(~np.isfinite(numbers), "is missing or not finite", target)
    if target.kind == LABELS:
        _refuse_row((numbers != 0) & (numbers != 1), "is not 0 or 1", target)
        return torch.from_numpy(numbers).float()
    outside = np.count_nonzero((numbers < np.array(target.low)) | (numbers > np.array(target.high)))
    if outside:
        logger.warning(
            "%s: %d of %d targets lie outside target_low..target_high, and are clamped",
            what,
            outside,
            numbers.size,
        )
    return target.scaled(torch.from_numpy(numbers))


def _intervals(values: Array, target: Target) -> Tensor:
    """A time and 1 or 0 for an event, (n, 2), as survived intervals and that of the event."""
    time, event = values.T
    for wrong, how in (
        (
            ~np.isfinite(time) | (time < 0),
            "the time is missing, negative or not finite: correct it",
        ),
        ((event != 0) & (event != 1), "the event is not 0 or 1"),
    ):
        if wrong.any():
            raise CellError(int(np.argmax(wrong)), how)
    ends = np.asarray(target.high)
    starts = np.asarray(target.low)
    reached = np.where(time[:, None] >= ends, 0.0, float(PADDING))
    # A time at the end of an interval is in it, and 0 is in the first.
    inside = (time[:, None] <= ends) & ((time[:, None] > starts) | (starts == 0))
    return torch.from_numpy(np.where(inside & (event[:, None] == 1), 1.0, reached)).float()


def _refuse_row(wrong: Array, how: str, target: Target) -> None:
    if wrong.any():
        row, column = (int(place) for place in np.argwhere(wrong)[0])
        raise CellError(row, f"{target.names[column]} {how}")


def _class_numbers(
    values: Array, length: int, *, num_classes: int, padding: int, what: str
) -> Tensor:
    """One class per row (length 0), or one per position, which may be padding."""
    if values.shape[1:] != ((length,) if length else ()) or values.dtype.kind not in "fiu":
        if length:
            wanted = f"{length} numbers per row, one for each position"
        else:
            wanted = "one number per row"
        raise FolderError(
            f"{what}: targets must be {wanted}, not {values.dtype} of shape {values.shape}"
        )
    padded = (values == padding) & (length > 0)
    small = np.abs(values) <= num_classes  # a cast of NaN or 1e300 would warn
    whole = np.where(small & ~padded, values, -1).astype(np.int64)
    wrong = np.argwhere(~padded & ((whole != values) | (whole < 0) | (whole >= num_classes)))
    if len(wrong):
        known = f"one of 0 to {num_classes - 1}"
        told = f"the class is not {known}"
        if length:
            told = (
                f"the class at position {wrong[0][1]} is neither {known} nor the padding {padding}"
            )
        raise CellError(int(wrong[0][0]), told)
    return torch.from_numpy(np.where(padded, PADDING, whole))
