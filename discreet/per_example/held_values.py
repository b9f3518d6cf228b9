"""Values of places that code of one's own can write to: copied, compared and written back."""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from operator import is_
from types import CellType, FunctionType, ModuleType
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn

from discreet.layers.refusals import CONFUSED
from discreet.per_example.attributes import package_of

_SAID_DEPTH = 3
_MOST_SAID = 2**24  # numbers of a tensor or an array that are compared
# Of these types and, by the methods of these, of those derived from them: methods of their own may
# do anything.
MAPPINGS = (OrderedDict, dict)
SEQUENCES = (list, tuple, deque)
SETS = (set, frozenset)
BYTES = (bytearray, array)
_FIXED = (tuple, frozenset)  # in which nothing can be replaced
CONTAINERS = (*MAPPINGS, *SEQUENCES, *SETS, *BYTES)
_NUMBERS = "biufc"  # kinds of arrays
_EMPTY = object()
PLAIN = (bool, int, float, complex, str, bytes, type(None))
# What their objects hold is not the model's.
LIBRARIES = sys.stdlib_module_names - {"__main__", "types", "collections", "queue", "weakref"}
LIBRARIES |= {"torch", "numpy", "discreet"}


def contents_of(cell: CellType) -> Any:
    """What a variable of a closure holds; `_EMPTY` if nothing yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def fill(cell: CellType, contents: Any) -> None:
    if contents is _EMPTY:
        del cell.cell_contents
    else:
        cell.cell_contents = contents


def base_of(value: Any) -> Any:
    """The type of a container by which it is read and written."""
    return next(kind for kind in CONTAINERS if isinstance(value, kind))


def entries_of(value: Any) -> Any:
    """The entries of a container, copied."""
    base = base_of(value)
    if base is array:
        return value[:]
    if base in MAPPINGS:
        return dict(base.items(value))
    return base(base.__iter__(value))


def refill(value: Any, entries: Any) -> None:
    """Gives a container these entries."""
    base = base_of(value)
    if base in (list, *BYTES):
        base.__setitem__(value, slice(None), entries)
        return
    base.clear(value)
    (deque.extend if base is deque else base.update)(value, entries)


def within(value: Any) -> Iterator[tuple[str, Any]]:
    """What a container holds that may be written to, and a name for each."""
    if isinstance(value, BYTES):
        return
    entries = entries_of(value)
    if isinstance(value, (*MAPPINGS, *SETS)):
        yield from ((" has a key", key) for key in entries if type(key) not in PLAIN)
    if not isinstance(value, SETS):
        pairs = entries.items() if isinstance(entries, dict) else enumerate(entries)
        yield from ((f"[{key!r}]", held) for key, held in pairs if type(held) not in PLAIN)


def is_fixed(value: Any) -> bool:
    """True for a container in which nothing can be replaced."""
    return isinstance(value, _FIXED)


def set_attribute(value: Any, name: str, held: Any) -> None:
    """Gives an object an attribute, whatever its type says about that."""
    try:
        object.__setattr__(value, name, held)
    except TypeError:  # a type of C that forbids this, such as threading.local
        vars(value)[name] = held


def take_attribute(value: Any, name: str) -> None:
    """The same for one that is deleted."""
    try:
        object.__delattr__(value, name)
    except TypeError:
        del vars(value)[name]


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an object by name, also those in slots."""
    found = dict(getattr(value, "__dict__", {}))
    for name in _slots_of(type(value)):  # type: ignore[arg-type]
        if hasattr(value, name):
            found[name] = getattr(value, name)
    return found


@lru_cache(maxsize=1024)
def _slots_of(kind: type) -> tuple[str, ...]:
    found = list[str]()
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        names = [slots] if isinstance(slots, str) else slots
        found += [_mangled(name, base) for name in names]
    return tuple(name for name in found if not name.startswith("__"))


def _mangled(name: str, kind: type) -> str:
    """The name that Python gives to an attribute of a class."""
    is_private = name.startswith("__") and not name.endswith("__")
    return f"_{kind.__name__.lstrip('_')}{name}" if is_private else name


def is_replaced(now: Any, before: Any) -> bool:
    """True if a place has another object, or a container there others. What is written into the
    same objects is at places of their own."""
    if now is before:
        return False
    if type(now) is not type(before):
        return True
    if isinstance(now, np.ndarray):
        is_other = (now.dtype, now.shape) != (before.dtype, before.shape)
        return is_other or not _are_same(now, before)
    if isinstance(now, BYTES):
        return bytes(now) != bytes(before)
    if not isinstance(now, CONTAINERS) or len(now) != len(before):
        return True
    if isinstance(now, SETS):
        return set(map(id, now)) != set(map(id, before))
    if isinstance(now, dict) and not all(map(is_, now.values(), before.values())):
        return True
    return not all(map(is_, now, before))


def _are_same(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    """True if two arrays of one type and shape have the same bytes."""
    if one.dtype.kind not in _NUMBERS:
        return one.tobytes() == other.tobytes()
    now, before = (np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in (one, other))
    return np.array_equal(now, before)


def said(value: Any, depth: int = 0) -> object:
    """Values in a form that can be compared: of tensors and arrays all bytes, of other objects
    their attributes, of what can't be looked into which object it is."""
    kind = type(value).__qualname__
    if isinstance(value, float):
        return repr(value)  # NaN is NaN
    if type(value) in PLAIN:
        return value
    if isinstance(value, Tensor):
        return kind, tuple(value.shape), _bytes_of(value)
    if isinstance(value, np.ndarray | np.generic):
        return kind, value.shape, _bytes_of_array(value)
    if depth == _SAID_DEPTH:
        return kind, id(value)
    if isinstance(value, dict):
        keys = [key() if isinstance(key, ref) else key for key in value]
        return kind, [
            (repr(key), said(held, depth + 1))
            for key, held in zip(keys, value.values(), strict=True)
        ]
    if isinstance(value, SEQUENCES):
        return kind, [said(held, depth + 1) for held in entries_of(value)]
    if isinstance(value, (*SETS, *BYTES)):
        return kind, sorted(map(repr, value))
    if isinstance(value, nn.Module | ModuleType | type | FunctionType):
        return kind, id(value)
    if package_of(type(value).__module__) in LIBRARIES:
        return kind, id(value)
    return kind, said(attributes_of(value), depth + 1)


def _bytes_of(value: Tensor) -> object:
    if value.numel() > _MOST_SAID or value.layout != torch.strided:
        return id(value)
    with suppress(*CONFUSED):  # a batched tensor of vmap
        return hash(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return id(value)


def _bytes_of_array(value: np.ndarray[Any, Any] | np.generic) -> object:
    if value.size > _MOST_SAID:
        return id(value)
    if value.dtype.hasobject:
        return repr(value.tolist())
    return hash(value.tobytes())
