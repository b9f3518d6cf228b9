"""Layouts: where the examples are in a tensor, and how an operation moves them.

A tensor of the examples has them along one dimension, in which example i of n stands at the places (a, i, b), for a
below `before` and b below `after`: n rows are (0, 1, 1), a batch of T steps (T, n, d) is (1, 1, 1), and the same rows
flattened, (T * n, d), are (0, T, 1). An operation is served if the entries of example i in its result follow from the
entries of example i alone. That is read from the shapes and arguments of the call that ran. What does not hold, or is
not known, is a `Mixed`, with the words for it.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FEWEST = 4  # rows that a pass has at least: smaller batches are filled up


class Unserved(Exception):
    """The computation can't be shown to treat each example alone."""


class MixesExamples(ValueError):
    """A forward that mixes examples. `reason`: the call that does."""

    def __init__(self, reason: str) -> None:
        why = "Clipping bounds what one example changes only if each goes through the model alone"
        super().__init__(f"the model's forward mixes examples: {reason}. {why}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Mixed:
    """A value that is not known to follow example by example. `surely`: it is known that it does not."""

    reason: str
    surely: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """The examples along dimension `dim`, whose size is before * n * after. `drawn`: random numbers are in it."""

    dim: int
    before: int = 1
    after: int = 1
    drawn: bool = field(default=False, compare=False)

    def at(self, dim: int) -> Layout:
        return Layout(dim, self.before, self.after)

    def first(self, values: Tensor) -> Tensor:
        """The values with one row an example, (n, ...), positions in a fixed order."""
        if self == FIRST:
            return values
        shape = (*values.shape[: self.dim], self.before, -1, self.after, *values.shape[self.dim + 1 :])
        return values.reshape(shape).movedim(self.dim + 1, 0)

    def summed(self, values: Tensor) -> Tensor:
        """The sums over what belongs to one example, from (before * n * after, ...) to (n, ...)."""
        return values if self == FIRST else self.first(values).sum((1, 2))


Tag = Any  # a Layout or a Mixed, or a list of them for several results
FIRST = Layout(0)
CONSTANT = "constant"  # known of what follows from no example and no trainable parameter
PLACES = "places"  # known of the numbers of the examples
UNSEEN = Mixed("a tensor that comes from elsewhere")
BY_PLACE = "reads something by the place of an example in the batch"
_HOMES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def _compared(compare: Callable[[int, int], bool]) -> Any:
    """A comparison of a `Count`, if it has the same answer for every number of examples."""

    def method(self: Count, other: object) -> bool:
        if isinstance(other, Count):
            return compare(self.times, other.times)
        if isinstance(other, int) and other < FEWEST * self.times:
            return compare(FEWEST * self.times, other)
        raise _counted()

    return method


class Count(int):
    """`times` times the number of examples. It may say how many rows a tensor has, and no more."""

    times: int

    def __new__(cls, times: int, count: int) -> Count:
        self = super().__new__(cls, times * count)
        self.times = times
        return self

    def __mul__(self, other: object) -> Count:
        if type(other) is not int or other < 1:
            raise _counted()
        return Count(self.times * other, int(self) // self.times)

    __rmul__ = __mul__

    def __floordiv__(self, other: object) -> Any:
        if isinstance(other, Count) and self.times % other.times == 0:
            return self.times // other.times
        if type(other) is not int or self.times % other:
            raise _counted()
        return Count(self.times // other, int(self) // self.times)

    def __mod__(self, other: object) -> int:
        if not isinstance(other, int) or self.times % (other.times if isinstance(other, Count) else other):
            raise _counted()
        return 0

    __eq__, __ne__ = _compared(operator.eq), _compared(operator.ne)
    __lt__, __gt__ = _compared(operator.lt), _compared(operator.gt)
    __le__, __ge__ = _compared(operator.le), _compared(operator.ge)
    __hash__ = int.__hash__

    def _refused(self, *_: object) -> Any:
        raise _counted()

    __add__ = __radd__ = __sub__ = __rsub__ = __truediv__ = __rtruediv__ = __rfloordiv__ = __rmod__ = _refused
    __pow__ = __rpow__ = __neg__ = __float__ = __divmod__ = __rdivmod__ = _refused


def _counted() -> Unserved:
    return Unserved(f"the number of examples is used as a number{place()}")


def place() -> str:
    """The nearest line that is neither PyTorch's nor of this folder, in words."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HOMES):
        frame = frame.f_back  # type: ignore[assignment]
    return "" if frame is None else f" at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def refusal(tag: Mixed) -> Exception:
    """The error for a value that the loss needs, and that does not follow example by example."""
    return MixesExamples(tag.reason) if tag.surely else Unserved(tag.reason)


def placed(tag: Mixed) -> Mixed:
    """A reason with the line of the forward that it is about."""
    return tag if " at " in tag.reason else Mixed(f"{tag.reason}{place()}", tag.surely)


def leaves(value: Any) -> list[Any]:
    """The values in nested tuples, lists, slices and dictionaries."""
    found: list[Any] = []
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, tuple | list):
            waiting += reversed(each)
        elif isinstance(each, dict):
            waiting += reversed(each.values())
        elif isinstance(each, slice):
            waiting += (each.step, each.stop, each.start)
        else:
            found.append(each)
    return found
