"""A watch over a data set: reading one of its items must not read another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import index as whole_number
from types import new_class
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

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


class ItemWatch:
    """A data set whose items must each be read from their own index alone.

    An item that is mixed from several (mixup, mosaic, a random partner) would carry an example into
    batches that did not draw it. It sees reads of the data set by itself, of data sets in its
    attributes, and of lists, tensors and arrays there that have as many rows as there are items,
    also of such tensors and arrays that are computed from them. It does not see rows that are read
    elsewhere, nor numbers that are computed from all rows, such as a mean.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        # the rows read for the current item, by the identity of the object that holds them
        self._rows = dict[int, set[int]]()
        # the replacement of each watched object, and the object
        self._stand_ins = dict[object, tuple[Any, Any]]()

    def __getstate__(self) -> dict[str, Any]:
        """The state that a worker gets: the classes made here can't be pickled."""
        return {"dataset": self.dataset, "_rows": {}, "_stand_ins": {}}

    def __getitem__(self, position: int) -> Any:
        """An item. Raises ValueError: it was made from several rows."""
        self._rows.clear()
        item = self._watched(self.dataset)[position]
        if any(len(rows) > 1 for rows in self._rows.values()):
            raise ValueError(
                "dataset: reading one item reads others too (mixup, mosaic, a random partner), "
                "and would carry an example into batches that did not draw it: make an item of "
                "its own index alone"
            )
        return item

    def _note(self, holder: object, index: Any, count: int) -> None:
        self._rows.setdefault(id(holder), set()).update(rows_at(index, count))

    def _watched(self, dataset: Any) -> Any:
        """An object that shares the attributes of a data set, with a class that notes reads."""
        if id(dataset) not in self._stand_ins:
            self._stand_ins[id(dataset)] = self._stand_in(dataset), dataset
        return self._stand_ins[id(dataset)][0]

    def _stand_in(self, dataset: Any) -> Any:
        kind: Any = type(dataset)
        count = len(dataset)

        def get_item(stand_in: Any, index: Any) -> Any:
            self._note(dataset, index, count)
            return kind.__getitem__(stand_in, index)

        def get_attribute(stand_in: Any, name: str) -> Any:
            value = kind.__getattribute__(stand_in, name)
            if name.startswith("__"):
                return value
            return self._attribute(value, (id(dataset), name), count)

        names = {
            "__getitem__": get_item,
            "__getattribute__": get_attribute,
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "__del__": lambda _: None,  # the data set itself is still there
        }
        try:
            made: Any = object.__new__(
                new_class(kind.__name__, (kind,), {}, lambda body: body.update(names))
            )
            object.__setattr__(made, "__dict__", vars(dataset))
        # A list, or a class not written in Python, has no attributes that could hold other rows.
        except TypeError:
            return dataset
        return made

    def _attribute(self, value: Any, place: tuple[int, str], count: int) -> Any:
        if isinstance(value, Dataset):
            return self._watched(value)
        if type(value) in (list, tuple) and value and isinstance(value[0], Dataset):
            return type(value)(
                self._watched(each) if isinstance(each, Dataset) else each for each in value
            )
        make = _ROWS.get(type(value))
        if make is None or getattr(value, "ndim", 1) == 0 or len(value) != count:
            return value
        known = self._stand_ins.get(place)
        if known is None or known[1] is not value or len(known[0]) != count:
            made = make(value)
            made.noted = lambda index: self._note(value, index, count)
            made.whole = value
            known = made, value
            self._stand_ins[place] = known
        return known[0]


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


class _Rows(Tensor):
    noted: Noted
    whole: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The result as of a plain tensor. If it has as many rows, these are watched too."""
        result = torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})
        given = next((each for each in args if isinstance(each, cls)), None)
        plain = type(result) is Tensor and result.ndim > 0
        if given is None or not plain or len(result) != len(given.whole):
            return result
        made = result.as_subclass(cls)
        made.noted = given.noted
        made.whole = result
        return made

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


# The stand-in for rows of each kind.
_ROWS: dict[type, Callable[[Any], Any]] = {
    list: _List,
    tuple: _Tuple,
    Tensor: lambda value: value.as_subclass(_Rows),
    np.ndarray: lambda value: value.view(_Array),
    np.memmap: lambda value: value.view(_Array),
}
