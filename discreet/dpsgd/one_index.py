"""A check that no example stands at several indices of a data set, where it would be drawn more
often and count several times in a sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import ConcatDataset, Subset, TensorDataset

Numbers = NDArray[np.int64]


def check_one_index(dataset: Any, owners: Sequence[object] | None) -> None:
    """Raises ValueError if two indices have the same row of the same data set, through `Subset`,
    `ConcatDataset` and `random_split`, or the same tensors of a list, and different `owners`."""
    leaves = dict[object, int]()
    holders, rows = _places(dataset, leaves)
    order = np.lexsort((rows, holders))
    same = (np.diff(holders[order]) == 0) & (np.diff(rows[order]) == 0)
    for at in same.nonzero()[0].tolist():
        one, other = sorted((int(order[at]), int(order[at + 1])))
        if owners is None or bool(owners[one] != owners[other]):
            raise ValueError(
                f"dataset: items {one} and {other} are the same example, which would count several "
                "times in a sum: give each example one index, or name who owns each item (owners=)"
            )


def _places(dataset: Any, leaves: dict[object, int]) -> tuple[Numbers, Numbers]:
    """The number of the data set that holds each item, and its row there."""
    if type(dataset) is Subset:
        holders, rows = _places(dataset.dataset, leaves)
        chosen = np.asarray(dataset.indices, dtype=np.int64)
        return holders[chosen], rows[chosen]
    if type(dataset) is ConcatDataset:
        parts = [_places(part, leaves) for part in dataset.datasets]
        return np.concatenate([one for one, _ in parts]), np.concatenate([two for _, two in parts])
    count = len(dataset)
    number = leaves.setdefault(identity(dataset), len(leaves))
    rows = np.arange(count, dtype=np.int64)
    if type(dataset) is list:
        known = dict[object, int]()
        rows = np.array(
            [known.setdefault(_memory(item, at), at) for at, item in enumerate(dataset)], np.int64
        )
    return np.full(count, number, dtype=np.int64), rows


def identity(dataset: Any) -> object:
    """What two data sets with the same rows have in common."""
    if isinstance(dataset, TensorDataset):
        return tuple((value.data_ptr(), value.shape) for value in dataset.tensors)
    return id(dataset)


def _memory(item: Any, place: int) -> object:
    """Where the values of an item of a list are; its place if it holds no tensor or array."""
    found = list[object]()
    is_held = False
    for value in tree_leaves(item):
        if isinstance(value, Tensor) and value.numel():
            found.append((value.data_ptr(), value.shape))
        elif isinstance(value, np.ndarray) and value.size:
            found.append((value.__array_interface__["data"][0], value.shape))
        else:
            found.append(value if isinstance(value, int | float | str) else id(value))
            continue
        is_held = True
    return tuple(found) if is_held else place
