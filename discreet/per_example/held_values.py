"""Values of places that code of one's own can write to: copied, compared and written back."""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict, deque
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
SETS = (set,)
BYTES = (bytearray, array)
_HOLDING = (dict, list, tuple)
CONTAINERS = (*MAPPINGS, *SEQUENCES, *SETS, *BYTES)
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


def is_changed(now: Any, before: Any) -> bool:
    """True if something was written to a place. What the same objects hold is at their own."""
    if now is before:
        return False
    if type(now) is type(before) and type(now) in _HOLDING and len(now) == len(before):
        held = [[*each, *each.values()] if type(each) is dict else each for each in (now, before)]
        if all(map(is_, *held)):
            return False
    return said(now) != said(before)


def said(value: Any, depth: int = 0) -> object:
    """Values in a form that can be compared: of tensors and arrays all bytes, of other objects
    their attributes."""
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
        return kind
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
        return kind
    return kind, said(attributes_of(value), depth + 1)


def _bytes_of(value: Tensor) -> object:
    if value.numel() > _MOST_SAID or value.layout != torch.strided:
        return None
    with suppress(*CONFUSED):  # a batched tensor of vmap
        return hash(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return None


def _bytes_of_array(value: np.ndarray[Any, Any] | np.generic) -> object:
    if value.size > _MOST_SAID:
        return None
    if value.dtype.hasobject:
        return repr(value.tolist())
    return hash(value.tobytes())
