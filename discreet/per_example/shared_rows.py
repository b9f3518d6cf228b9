"""Rows of a batch that share memory, as those of an expanded tensor or of windows: what a forward
writes into one of them would reach other examples."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement, starmap
from typing import NamedTuple

from torch import Tensor

from discreet.per_example.graphs import Graphs
from discreet.per_example.objective import Tree, batches_in, mapped


class _Span(NamedTuple):
    """Where the rows of a tensor lie, in bytes: the first one's address, the steps from each to the
    next, the size of one, and the end of all."""

    start: int
    step: int
    row: int
    end: int


def in_own_memory(inputs: Tree, targets: Tree) -> tuple[Tree, Tree]:
    """A batch in which no row shares memory with another one; the same if it is one already."""
    if _lie_apart([part for part in batches_in((inputs, targets)) if isinstance(part, Tensor)]):
        return inputs, targets
    return mapped(_copied, inputs), mapped(_copied, targets)


def _copied(part: Tensor | Graphs) -> Tensor | Graphs:
    return part.clone() if isinstance(part, Tensor) else part


def _lie_apart(parts: Sequence[Tensor]) -> bool:
    """True if surely no row of a tensor shares memory with another row of it or of the others."""
    return all(starmap(_are_apart, combinations_with_replacement(map(_span, parts), 2)))


def _span(part: Tensor) -> _Span:
    sizes = zip(part.shape[1:], part.stride()[1:], strict=True)
    width = 1 + sum((size - 1) * step for size, step in sizes)
    start = part.data_ptr()
    step = part.element_size() * part.stride(0)
    row = part.element_size() * width
    return _Span(start, step, row, start + (len(part) - 1) * step + row)


def _are_apart(one: _Span, other: _Span) -> bool:
    """True for tensors apart, and for columns of one table."""
    if one.end <= other.start or other.end <= one.start:
        return True
    width = max(one.start + one.row, other.start + other.row) - min(one.start, other.start)
    return one.step == other.step and width <= one.step
