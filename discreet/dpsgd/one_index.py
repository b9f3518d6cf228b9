"""A check that no example stands at several indices of a data set, where it would be drawn more
often and count several times in a sum, and that no two share memory, as windows do that overlap."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import ConcatDataset, Subset, TensorDataset

Numbers = NDArray[np.int64]


def check_one_index(dataset: Any, owners: Sequence[object] | None) -> None:
    """Raises ValueError if two indices have the same row of the same data set, through `Subset`,
    `ConcatDataset` and `random_split`, the same tensors of a list as inputs, or values in common,
    and different `owners`."""
    leaves = dict[object, int]()
    holders, rows = _places(dataset, leaves)
    order = np.lexsort((rows, holders))
    same = (np.diff(holders[order]) == 0) & (np.diff(rows[order]) == 0)
    for at in same.nonzero()[0].tolist():
        one, other = sorted((int(order[at]), int(order[at + 1])))
        if _are_apart(owners, one, other):
            raise ValueError(
                f"dataset: items {one} and {other} are the same example, which would count several "
                "times in a sum: give each example one index, or name who owns each item (owners=)"
            )
    if isinstance(dataset, TensorDataset) and all(part.is_contiguous() for part in dataset.tensors):
        return  # no two elements are one
    from discreet.dpsgd.overlaps import overlaps

    for one, other in overlaps(dataset, np.arange(len(dataset))):
        if _are_apart(owners, one, other):
            raise ValueError(
                f"dataset: items {one} and {other} share values, which would count several times "
                "in a sum (windows of a series that overlap): cut them side by side, or name who "
                "owns each item (owners=)"
            )


def _are_apart(owners: Sequence[object] | None, one: int, other: int) -> bool:
    """True unless two items have one owner."""
    return owners is None or bool(owners[one] != owners[other])


def _places(dataset: Any, leaves: dict[object, int]) -> tuple[Numbers, Numbers]:
    """The number of the data set that holds each item, and its row there."""
    if type(dataset) is Subset:
        holders, rows = _places(dataset.dataset, leaves)
        chosen = np.asarray(dataset.indices, dtype=np.int64)
        return holders[chosen], rows[chosen]
    if type(dataset) is ConcatDataset:
        parts = [_places(part, leaves) for part in dataset.datasets]
        return np.concatenate([one for one, _ in parts]), np.concatenate([two for _, two in parts])
    selected = selected_rows(dataset)
    if selected is not None:
        number = leaves.setdefault(id(dataset._data), len(leaves))
        return np.full(len(selected), number), selected
    count = len(dataset)
    number = leaves.setdefault(identity(dataset), len(leaves))
    rows = np.arange(count, dtype=np.int64)
    if isinstance(dataset, list | tuple | deque):
        known = dict[object, int]()
        rows = np.array(
            [known.setdefault(_memory(item, at), at) for at, item in enumerate(dataset)], np.int64
        )
    return np.full(count, number, dtype=np.int64), rows


def is_of_datasets(value: Any) -> bool:
    """True for a data set of Hugging Face's datasets."""
    return type(value).__module__ == "datasets.arrow_dataset"


def selected_rows(dataset: Any) -> Numbers | None:
    """The rows of a data set of Hugging Face's `datasets` after `select` or `shuffle`."""
    if not is_of_datasets(dataset) or dataset._indices is None:
        return None
    return np.asarray(dataset._indices.column(0), dtype=np.int64)


def identity(dataset: Any) -> object:
    """What two data sets with the same rows have in common. Raises ValueError: a tensor has no
    plain memory."""
    if isinstance(dataset, TensorDataset):
        for value in dataset.tensors:
            if value.layout != torch.strided or value.is_nested or value.is_quantized:
                raise ValueError(
                    "dataset: tensors must be dense and not quantized (to_dense(), dequantize())"
                )
        return tuple((value.data_ptr(), value.shape) for value in dataset.tensors)
    return id(dataset)


def _memory(item: Any, place: int) -> object:
    """Where the inputs of an item of a list are; its place if they are no tensor or array."""
    found = list[object]()
    is_held = False
    inputs = item[0] if isinstance(item, list | tuple) and len(item) == 2 else item
    for value in tree_leaves(inputs):
        if isinstance(value, Tensor) and value.numel():
            found.append((value.data_ptr(), value.shape))
        elif isinstance(value, np.ndarray) and value.size:
            found.append((value.__array_interface__["data"][0], value.shape))
        else:
            found.append(value if isinstance(value, int | float | str) else id(value))
            continue
        is_held = True
    return tuple(found) if is_held else place
