"""Plain attributes of modules: changes by a pass are undone, so that they reach no other pass.

A clipped sum bounds the influence of an example on the gradients, and on nothing else. A running
maximum, a queue or a stored mean would carry an example into steps in which it is absent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from operator import is_
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

NUMBERS = (bool, int, float, str)
_CONTAINERS = (list, dict, set, deque)
_NO_OBJECTS = (Tensor, nn.Module, ModuleType, FunctionType, type, *NUMBERS, *_CONTAINERS)
_MOST_ENTRIES = 2**12  # of a global container that is restored
OF_MODULES = frozenset(nn.Module().__dict__)
_NO_NUMBERS = OF_MODULES - {
    name for name, value in nn.Module().__dict__.items() if type(value) in NUMBERS
}
HOOKS = frozenset(name for name in nn.Module().__dict__ if "hooks" in name)


def _items(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [*container.keys(), *container.values()]
    return list(container)


def _entries_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object, such as settings; None for modules, tensors, functions and
    classes."""
    if isinstance(value, _NO_OBJECTS):
        return None
    entries = getattr(value, "__dict__", None)
    return entries if type(entries) is dict else None


def _look(value: Any, copies: bool) -> Callable[[], bool] | None:
    """A function that tells later if an object is unchanged; None for an object that can't be
    written to."""
    if isinstance(value, Tensor):
        return _look_at_tensor(value, copies)
    if isinstance(value, _CONTAINERS):
        held: Any = value
        before = _items(held)
        inner = [_look_at_tensor(each, copies) for each in before if isinstance(each, Tensor)]
        return lambda: _are_same(_items(held), before) and all(look() for look in inner)
    return None


def _look_at_tensor(value: Tensor, copies: bool) -> Callable[[], bool]:
    version = value._version
    if not copies:
        return lambda: value._version == version
    copy = _plain(value).clone()
    return lambda: value._version == version and torch.equal(_plain(value), copy)


def _plain(value: Tensor) -> Tensor:
    """The values of a tensor, dense and without NaN."""
    dense = value.detach() if value.layout == torch.strided else value.detach().to_dense()
    return dense.nan_to_num()


def _are_same(now: Collection[Any], before: Collection[Any]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


class Attributes:
    """A snapshot of the plain attributes of modules. `copies`: with the values of their tensors,
    which `tensor.data` can change without a trace."""

    def __init__(self, modules: Iterable[nn.Module], *, copies: bool = False) -> None:
        self._held: list[tuple[nn.Module, dict[str, Any]]] = []
        self._looks: list[tuple[nn.Module, str, Callable[[], bool]]] = []
        self._hooks: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._no_hooks: list[dict[Any, Any]] = []  # those that were empty
        objects = dict[int, dict[str, Any]]()
        for module in modules:
            own = dict(module.__dict__)
            self._held.append((module, own))
            for name in HOOKS & own.keys():
                if own[name]:
                    self._hooks.append((own[name], dict(own[name])))
                else:
                    self._no_hooks.append(own[name])
            if len(own) == len(OF_MODULES):
                continue
            for name, value in own.items():
                if name in OF_MODULES:
                    continue
                look = _look(value, copies)
                if look is not None:
                    self._looks.append((module, name, look))
                elif (entries := _entries_of(value)) is not None:
                    objects[id(entries)] = entries
        self._objects = [(entries, entries.copy()) for entries in objects.values()]

    def moved(self) -> list[str]:
        """The names of the attributes that were replaced, added or deleted."""
        found = set[str]()
        for module, before in self._held:
            now = module.__dict__
            if _are_same(now.values(), before.values()):
                continue
            names = now.keys() | before.keys()
            found |= {name for name in names if now.get(name, _held) is not before.get(name, _held)}
        return sorted(found)

    def rebind(self) -> None:
        """Gives each attribute the object that it had, that object its own attributes, and each
        module its hooks: a forward may install some at its first call, and note that in an
        attribute."""
        for entries, known in self._objects:
            _write_back(entries, known)
        for module, before in self._held:
            if not _are_same(module.__dict__.values(), before.values()):
                module.__dict__.clear()
                module.__dict__.update(before)
        for hooks, known in self._hooks:
            if hooks != known:
                hooks.clear()
                hooks.update(known)
        if any(self._no_hooks):
            for hooks in self._no_hooks:
                hooks.clear()

    def put_back(self) -> None:
        """Restores the attributes of each module, and its hooks.

        Raises:
          ValueError: an object that an attribute holds was written to. That can't be undone.
        """
        self.rebind()
        for module, name, look in self._looks:
            if not look():
                raise ValueError(keeps(f"{type(module).__name__}.{name}"))


def _write_back(held: Any, copy: Any) -> None:
    """Gives a list, dictionary or set the entries of a copy of it."""
    if not _are_same(_items(held), _items(copy)):
        held.clear()
        (held.extend if isinstance(held, list | deque) else held.update)(copy)


@lru_cache(maxsize=1024)
def _names_used(kind: type) -> list[tuple[dict[str, Any], str]]:
    """The global names in the code of a class's methods, each with the globals that it is in."""
    if kind.__module__.split(".")[0] in ("torch", "builtins"):
        return []
    functions = [each for each in vars(kind).values() if isinstance(each, FunctionType)]
    return [(each.__globals__, name) for each in functions for name in each.__code__.co_names]


def _globals_of(modules: Iterable[nn.Module]) -> list[tuple[Any, Any]]:
    """The lists, dictionaries and sets in global names that forwards use, and the attributes of
    objects there, with copies."""
    found = dict[int, Any]()
    for kind in {kind for module in modules for kind in type(module).__mro__}:
        for names, name in _names_used(kind):
            value: Any = names.get(name)
            if type(value) not in _CONTAINERS:
                value = _entries_of(value)
            if value is not None and len(value) <= _MOST_ENTRIES:
                found[id(value)] = value
    return [(value, value.copy()) for value in found.values()]


def numbers_of(modules: Iterable[nn.Module]) -> list[object]:
    """What an answer of a forward may depend on beside inputs and parameters: numbers in the
    attributes of modules, and in objects that are attributes, such as settings; tensors by their
    versions."""
    found = list[object]()
    seen = set[int]()  # objects that several modules share
    for module in modules:
        own = [each for each in module.__dict__.items() if each[0] not in _NO_NUMBERS]
        for name, value in (*own, *module._buffers.items()):
            if isinstance(value, Tensor):
                found.append((name, id(value), value._version))
            elif type(value) in NUMBERS:
                found.append((name, value))
            elif hasattr(value, "__dict__") and id(value) not in seen:
                seen.add(id(value))
                held = vars(value).items()
                found += [(key, inner) for key, inner in held if type(inner) in NUMBERS]
    return found


_held = object()


@contextmanager
def put_back(modules: Iterable[nn.Module]) -> Iterator[None]:
    """A context in which a forward may change the attributes of its modules and of their objects,
    and in global names the entries of lists, dictionaries and sets, and the attributes of objects;
    at the end they are restored."""
    modules = tuple(modules)
    before = Attributes(modules)
    outside = _globals_of(modules)
    try:
        yield
    finally:
        for held, copy in outside:
            _write_back(held, copy)
        with torch.no_grad():
            before.put_back()


@contextmanager
def rebound(modules: Iterable[nn.Module]) -> Iterator[None]:
    """A context in which parameters may be trained, and attributes be given other objects; at the
    end they have those of the beginning."""
    before = Attributes(modules)
    try:
        yield
    finally:
        before.rebind()


def keeps(name: str) -> str:
    """The message that refuses a model which carries state from one pass into the next."""
    return (
        f"the model's forward writes into its attribute {name}: what an example leaves there "
        "would reach steps in which it is absent, neither clipped nor noised. Take out what "
        "keeps it, or make it anew in each forward"
    )
