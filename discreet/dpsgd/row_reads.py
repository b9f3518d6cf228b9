"""Reads of rows, wherever they are held: a `TorchFunctionMode` sees those of tensors, and for the
time of a read pandas has methods that note what they read. Arrays, lists and dictionaries have
stand-ins (`row_stand_ins.py`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from discreet.dpsgd.row_stand_ins import array_noting
from discreet.layers.functions import called_inside, function_of, words
from discreet.layers.refusals import CONFUSED
from discreet.per_example.memory import names_in, namespaces

Noted = Callable[..., None]  # the holder's key, an index of its rows, and its length
# Functions whose results are some of the rows, and those that read nothing or keep all rows apart.
_SELECTING = words(
    "getitem index_select take take_along_dim gather masked_select narrow narrow_copy select "
    "embedding"
)
_HARMLESS = words(
    "tolist numpy unbind split chunk tensor_split hsplit vsplit __contains__ __iter__ iter "
    "__array__ __reduce_ex__ share_memory pin_memory is_shared"
)
_SUMMARIES = words("mean sum std var min max median quantile nunique sem")
_MOST_HELD = 64  # entries of a container that are looked into
_DEPTH = 5
_LIBRARIES = ("builtins", "torch", "typing", "numpy")


def held_by(root: Any) -> Iterator[Any]:
    """The tensors and tables that an object's methods can reach: in its attributes, in what these
    hold, on classes, in global names of modules and in closures."""
    waiting: list[tuple[Any, int]] = [(root, 0)]
    seen = set[int]()
    while waiting:
        value, depth = waiting.pop()
        if id(value) in seen or isinstance(value, np.ndarray | str | bytes):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor) or _is_table(value):
            yield value
        elif depth < _DEPTH:
            waiting += [(each, depth + 1) for each in _inner(value)]


def _inner(value: Any) -> list[Any]:
    if isinstance(value, dict | list | tuple | set):
        if len(value) > _MOST_HELD:
            return []
        return list(value.values() if isinstance(value, dict) else value)
    if isinstance(value, FunctionType):
        return _used_by(value)
    if isinstance(value, type):
        return _of_class(value)
    if isinstance(value, ModuleType):  # in an attribute
        return [] if _is_library(value.__name__) else list(vars(value).values())
    found = [getattr(value, name, None) for name in ("__func__", "__self__", "fget")]
    if hasattr(value, "__dict__"):
        found += [*vars(value).values(), type(value)]
    return found


def _of_class(kind: type) -> list[Any]:
    """What a class and its bases hold, but for those of libraries."""
    own = [each for each in kind.__mro__ if not _is_library(each.__module__)]
    return [value for each in own for value in vars(each).values()]


def _used_by(function: FunctionType) -> list[Any]:
    """The values of a function's closure, and of the global names in its code."""
    names = names_in(function.__code__)
    named = [held[name] for _, held in namespaces(function, names) for name in names & held.keys()]
    found = [value for value in named if not isinstance(value, ModuleType)]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            found.append(cell.cell_contents)
    return found


def _is_library(module: str) -> bool:
    return module.split(".")[0] in _LIBRARIES


def _is_table(value: Any) -> bool:
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(value, pandas.DataFrame | pandas.Series)


class TensorReads(TorchFunctionMode):
    """Notes the rows of tensors that functions of PyTorch read. What is computed of a tensor and
    has as many rows counts as its rows; what has others, such as a mean, reads all of them."""

    def __init__(self, tensors: list[Tensor], note: Noted) -> None:
        super().__init__()
        self.note = note
        self.inner: Any = None
        self.bases = dict[tuple[int, int], Tensor]()
        self.derived = dict[int, tuple[Tensor, object]]()
        for value in tensors:
            if value.dim() and len(value) > 1 and value.layout == torch.strided:
                self.bases[value.data_ptr(), len(value)] = value

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        function = function_of(func)
        if function.is_python and not function.is_plain and func is not self.inner:
            return called_inside(self, func, types, args, named)
        result = func(*args, **named)
        if function.name == "getitem" and type(args[1]) is int:  # most reads
            key = self._key(args[0])
            if key is not None:
                self.note(key, args[1], len(args[0]))
            return result
        if not function.is_fact and function.name not in _HARMLESS:
            for value in tree_leaves((args, named)):
                key = self._key(value)
                if key is not None:
                    self._see(key, partial(func, **named), args, value, result)
        return result

    def _key(self, value: Any) -> object:
        if not isinstance(value, Tensor) or not value.dim() or value.layout != torch.strided:
            return None
        if id(value) in self.derived:
            return self.derived[id(value)][1]
        place = value.data_ptr(), len(value)
        return place if place in self.bases else None

    def _see(self, key: object, func: Any, args: Any, value: Tensor, result: Any) -> None:
        if function_of(func.func).name in _SELECTING:
            rows = torch.arange(len(value), device=value.device)
            rows = rows.view(-1, *[1] * (value.dim() - 1)).expand(value.shape)
            with suppress(*CONFUSED):
                found = func(*[rows if each is value else each for each in args])
                if found.shape[:1] == value.shape[:1] and torch.equal(found, rows.expand_as(found)):
                    self.derived[id(result)] = (result, key)
                else:
                    self.note(key, found.unique().cpu(), len(value))
            return
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.dim() and len(each) == len(value):
                self.derived[id(each)] = (each, key)
            elif isinstance(each, Tensor):
                self.note(key, slice(None), len(value))


@contextmanager
def table_reads(tables: list[Any], note: Noted) -> Iterator[None]:
    """A context in which reads of rows of pandas' tables are noted, also of their columns, and of
    what is computed of them and has their rows."""
    if not tables:
        yield
        return
    pandas: Any = sys.modules["pandas"]
    replaced = list[tuple[Any, str, Any]]()

    def replace(kind: Any, name: str, made: Callable[[Any], Any]) -> None:
        replaced.append((kind, name, vars(kind).get(name)))
        setattr(kind, name, made(getattr(kind, name)))

    reads = _Reads([table.index for table in tables], note)
    frame = pandas.DataFrame()
    for name in ("iloc", "iat", "loc", "at"):
        rows = _placed if name.startswith("i") else _labelled
        replace(type(getattr(frame, name)), "__getitem__", partial(reads.by_index, rows))
    replace(pandas.Series, "__getitem__", partial(reads.by_index, _labelled))
    for kind in (pandas.DataFrame, pandas.Series):
        replace(kind, "take", partial(reads.by_index, _placed))
        replace(kind, "to_numpy", reads.as_array)
        replace(kind, "values", lambda real: property(reads.as_array(real.fget)))
        for name in _SUMMARIES:
            if hasattr(kind, name):
                replace(kind, name, partial(reads.by_index, lambda table, _: slice(None)))
    try:
        yield
    finally:
        for kind, name, before in reversed(replaced):
            if before is None:
                delattr(kind, name)
            else:
                setattr(kind, name, before)


class _Reads:
    """Methods of pandas' tables that note what they read of the rows with some `indices`."""

    def __init__(self, indices: list[Any], note: Noted) -> None:
        self.indices = indices
        self.note = note

    def key(self, table: Any) -> object:
        """What names the rows of a table; None for other rows. Columns have views of its index."""
        index = getattr(table, "index", None)
        return next((id(each) for each in self.indices if each.is_(index)), None)

    def by_index(self, rows: Callable[[Any, Any], Any], real: Any) -> Any:
        """A method that notes the rows of its first argument, if it leaves rows out."""

        def noted(self: Any, *args: Any, **named: Any) -> Any:
            result = real(self, *args, **named)
            table = getattr(self, "obj", self)
            key = reads.key(table)
            if key is not None and reads.key(result) != key:
                reads.note(key, rows(table, args[0] if args else None), len(table))
            return result

        reads = self
        return noted

    def as_array(self, real: Any) -> Any:
        """A method whose result is an array that notes its reads."""

        def noted(table: Any, *args: Any, **named: Any) -> Any:
            result = real(table, *args, **named)
            key = self.key(table)
            if key is None or not isinstance(result, np.ndarray):
                return result
            return array_noting(result, partial(self.note, key, count=len(table)))

        return noted


def _placed(table: Any, key: Any) -> Any:
    """The places of an index; none for a slice of all rows, such as pandas takes in `where`."""
    first = key[0] if isinstance(key, tuple) else key
    if isinstance(first, slice) and first.indices(len(table)) == (0, len(table), 1):
        return []
    return key


def _labelled(table: Any, key: Any) -> Any:
    """The places of labels."""
    first = key[0] if isinstance(key, tuple) else key
    if isinstance(first, slice):
        return table.index.slice_indexer(first.start, first.stop, first.step)
    if isinstance(first, list | np.ndarray) or _is_table(first):
        values = np.asarray(first)
        return values if values.dtype == bool else table.index.get_indexer_for(values)
    try:
        return table.index.get_loc(first)
    except (KeyError, TypeError):
        return []
