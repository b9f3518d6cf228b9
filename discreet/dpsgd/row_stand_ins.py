"""Stand-ins for arrays, lists and dictionaries of rows, which note what is read of them and
otherwise are like them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import index as whole_number
from operator import is_
from typing import Any

import numpy as np
from torch import Tensor

Noted = Callable[[Any], None]
_CHANGES = (
    "__setitem__",
    "__delitem__",
    "__iadd__",
    "__imul__",
    "append",
    "extend",
    "insert",
    "pop",
    "remove",
    "clear",
    "sort",
    "reverse",
)


def rows_at(index: Any, count: int) -> set[int]:
    """The rows that an index of `count` rows reads.

    >>> rows_at(-1, 5), rows_at(slice(1, 3), 5), rows_at([0, 2], 5)
    ({4}, {1, 2}, {0, 2})
    """
    if isinstance(index, tuple) and index:
        first = index[0]
    else:
        first = index
    if hasattr(first, "__index__") and not (isinstance(first, Tensor | np.ndarray) and first.ndim):
        return {whole_number(first) % count}
    if not isinstance(first, slice | list | Tensor | np.ndarray):
        return set()  # for instance the name of a column
    if isinstance(first, list) and not first:
        return set()
    return set(
        np.arange(count)[np.asarray(first) if isinstance(first, Tensor) else first].ravel().tolist()
    )


def _noted_row(self: Any, index: Any) -> Any:
    """Reads rows of the original, and notes that."""
    self.noted(index)
    return self.whole[index]


class _List(list[Any]):
    noted: Noted
    whole: list[Any]

    __getitem__ = _noted_row

    def __iter__(self) -> Iterator[Any]:
        self.noted(slice(None))
        return iter(self.whole)


def _changed_with(name: str) -> Callable[..., Any]:
    """A method that changes a list and the original that it stands for."""

    def change(self: _List, *given: Any) -> Any:
        getattr(list, name)(self, *given)
        changed = getattr(self.whole, name)(*given)
        if changed is self.whole:
            return self
        return changed

    return change


for _name in _CHANGES:
    setattr(_List, _name, _changed_with(_name))


class _Tuple(tuple[Any, ...]):
    __getitem__ = _noted_row


class _Array(np.ndarray[Any, Any]):
    noted: Noted | None = None

    def __array_finalize__(self, made_from: Any) -> None:
        """What is computed of watched rows, and has as many, is watched too."""
        if isinstance(made_from, _Array) and self.ndim and made_from.ndim:
            self.noted = made_from.noted if len(self) == len(made_from) else None

    def __getitem__(self, index: Any) -> Any:
        if self.noted is not None:
            self.noted(index)
        return np.asarray(self)[index]

    def transpose(self, *axes: Any) -> Any:
        """The transposed array, whose rows are columns: they are not watched."""
        return np.asarray(self).transpose(*axes)

    T = property(transpose)

    def take(  # type: ignore[override]
        self, indices: Any, axis: Any = None, **named: Any
    ) -> Any:
        rows = np.arange(len(self)).reshape(-1, *[1] * (self.ndim - 1))
        found = np.broadcast_to(rows, self.shape).take(indices, axis=axis, **named)
        if self.noted is not None:
            self.noted(np.unique(found))
        return np.asarray(self).take(indices, axis=axis, **named)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **named: Any) -> Any:
        """The plain result; watched if it has as many rows. A sum over rows reads all of them."""
        named["out"] = tuple(map(_plain, named["out"])) if "out" in named else None
        plain = [_plain(each) for each in inputs]
        result = getattr(ufunc, method)(*plain, **named)
        for given in inputs:
            if not isinstance(given, _Array) or given.noted is None:
                continue
            if isinstance(result, np.ndarray) and result.ndim and len(result) == len(given):
                made = result.view(_Array)
                made.noted = given.noted
                return made
            given.noted(slice(None))
        return result


def array_noting(value: Any, noted: Noted) -> Any:
    """An array that notes what is read of its rows."""
    made = value.view(_Array)
    made.noted = noted
    return made


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, _Array) else value


class _Entries(dict[Any, Any]):
    """Values are seen through `watched`, and writes reach the original."""

    noted: Noted
    whole: dict[Any, Any]
    watched: Callable[[Any, Any], Any]
    places: dict[Any, int]

    def __getitem__(self, key: Any) -> Any:
        if key in self.places:
            self.noted(self.places[key])
        return self.watched(self.whole[key], key)

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self.whole else default

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.whole[key] = value


# The stand-in for rows of each kind.
ROWS: dict[type, Callable[[Any], Any]] = {
    list: _List,
    tuple: _Tuple,
    dict: _Entries,
    np.ndarray: lambda value: value.view(_Array),
    np.memmap: lambda value: value.view(_Array),
}


def stripped(item: Any) -> Any:
    """An item without stand-ins, which a collate function may not know."""
    if isinstance(item, _Array):
        return np.asarray(item)
    if type(item) in (list, tuple):
        inner = [stripped(each) for each in item]
        return item if all(map(is_, inner, item)) else type(item)(inner)
    if type(item) is dict:
        held = {key: stripped(value) for key, value in item.items()}
        return item if all(map(is_, held.values(), item.values())) else held
    return item
