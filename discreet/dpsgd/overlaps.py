"""Items of a data set that have memory in common, as windows of a series that overlap. Copies are
not seen."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

Numbers = NDArray[np.int64]
_MOST_DISTANCES = 64  # between rows that have memory in common: those of long windows are many


def overlaps(dataset: Any, rows: Numbers) -> Iterator[tuple[int, int]]:
    """Pairs of items, which are these rows of a data set, that have some of their memory in common,
    and are next to each other in it."""
    if type(dataset) is Subset:
        yield from overlaps(dataset.dataset, np.asarray(dataset.indices)[rows])
    elif type(dataset) is ConcatDataset:
        start = 0
        parts: list[Any] = dataset.datasets
        for part in parts:
            places = np.flatnonzero((rows >= start) & (rows < start + len(part)))
            for one, other in overlaps(part, rows[places] - start):
                yield int(places[one]), int(places[other])
            start += len(part)
    elif isinstance(dataset, TensorDataset):
        for place, tensor in enumerate(dataset.tensors):
            is_target = 0 < place == len(dataset.tensors) - 1
            yield from _overlaps_of_rows(tensor, rows, may_be_constant=is_target)
    elif type(dataset) is StackDataset:
        held: Any = dataset.datasets
        for part in held.values() if isinstance(held, dict) else held:
            yield from overlaps(part, rows)
    elif isinstance(dataset, Tensor):
        yield from _overlaps_of_rows(dataset, rows, may_be_constant=False)
    elif isinstance(dataset, list | tuple | deque):
        yield from _overlaps_of_items([dataset[row] for row in rows.tolist()])
    else:  # what it holds for each item
        for part in getattr(dataset, "__dict__", {}).values():
            if isinstance(part, list | tuple) and len(part) == len(dataset):
                yield from overlaps(part, rows)
            elif isinstance(part, Tensor) and part.dim() and len(part) == len(dataset):
                yield from _overlaps_of_rows(part, rows, may_be_constant=True)


def _overlaps_of_rows(
    values: Tensor, rows: Numbers, *, may_be_constant: bool
) -> Iterator[tuple[int, int]]:
    """As `overlaps`, of rows of a tensor, such as `unfold` makes."""
    if values.layout != torch.strided or not values.dim() or not values.numel():
        return
    if values.is_contiguous():
        return
    step, *strides = values.stride()
    if step == 0 and may_be_constant:
        return
    # the distances in memory between two elements of a row
    between = np.zeros(1, dtype=np.int64)
    for size, stride in zip(values.shape[1:], strides, strict=True):
        between = np.unique(np.add.outer(between, np.arange(1 - size, size) * stride))
    if step == 0:
        apart = np.arange(1, len(values))
    else:
        apart = between[(between > 0) & (between % step == 0)] // step
    places = {row: place for place, row in enumerate(rows.tolist())}
    for distance in apart[apart < len(values)][:_MOST_DISTANCES].tolist():
        for row, place in places.items():
            if row + distance in places:
                yield place, places[row + distance]


def _overlaps_of_items(items: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """As `overlaps`, of the tensors and arrays in items, of which those at one place in the items
    are compared. Those that are wholly the same may be a constant."""
    held = defaultdict[int, list[tuple[int, int, int]]](list)
    for item, values in enumerate(items):
        for place, value in enumerate(tree_leaves(values)):
            if isinstance(value, np.ndarray) and value.flags.c_contiguous:
                start = value.__array_interface__["data"][0]
                held[place].append((start, start + value.nbytes, item))
            elif isinstance(value, Tensor) and value.is_contiguous():
                held[place].append((value.data_ptr(), value.data_ptr() + value.nbytes, item))
    for found in held.values():
        found.sort()
        for (start, end, one), (next_start, next_end, other) in pairwise(found):
            if next_start < end and (next_start, next_end) != (start, end):
                yield one, other
