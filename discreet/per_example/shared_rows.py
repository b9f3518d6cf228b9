"""Rows of a batch that share memory, such as a state that a `collate_fn` expands: what a forward of
one's own writes to one of them would reach the others."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from discreet.per_example.graphs import Graphs
from discreet.per_example.objective import Tree, batches_in, mapped


def in_own_memory(inputs: Tree, targets: Tree) -> tuple[Tree, Tree]:
    """A batch in which no row shares memory with another one: code of one's own may write there."""
    parts = [part for part in batches_in((inputs, targets)) if isinstance(part, Tensor)]
    if _lie_apart(parts):
        return inputs, targets
    return mapped(_copied, inputs), mapped(_copied, targets)


def _copied(part: Tensor | Graphs) -> Tensor | Graphs:
    return part.clone() if isinstance(part, Tensor) else part


def _lie_apart(parts: Sequence[Tensor]) -> bool:
    """True if surely no row of a tensor shares memory with another row of it or of the others."""
    spans = list[tuple[int, int, int]]()  # in bytes: the start, the step to the next row, a row
    for part in parts:
        width = 1 + sum(
            (size - 1) * step for size, step in zip(part.shape[1:], part.stride()[1:], strict=True)
        )
        size = part.element_size()
        spans.append((part.data_ptr(), size * part.stride(0), size * width))

    def are_apart(one: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
        (first, step, row), (later, other_step, other_row) = sorted((one, other))
        is_behind = first + (len(parts[0]) - 1) * step + row <= later
        return is_behind or (step == other_step and max(row, later + other_row - first) <= step)

    return all(itertools.starmap(are_apart, itertools.combinations_with_replacement(spans, 2)))
