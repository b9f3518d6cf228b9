"""Plain attributes of modules: changes by a pass are undone, so that they reach no other pass.

A clipped sum bounds the influence of an example on the gradients, and on nothing else. A running
maximum, a queue or a stored mean would carry an example into steps in which it is absent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from discreet.layers.model_state import writes


class Outside(Protocol):
    """What lies outside of modules, as it was."""

    def restore(self) -> bool:
        """Undoes all changes. True if there were some."""


NUMBERS = (bool, int, float, str)
_CONTAINERS = (list, dict, set, deque)
OF_MODULES = frozenset(nn.Module().__dict__)
_NO_NUMBERS = OF_MODULES - {
    name for name, value in nn.Module().__dict__.items() if type(value) in NUMBERS
}
HOOKS = frozenset(name for name in nn.Module().__dict__ if "hooks" in name)
_REGISTRIES = HOOKS | {"_parameters", "_buffers", "_modules"}


def _items(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [*container.keys(), *container.values()]
    return list(container)


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


def _is_unchanged(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    return list(now) == list(before) and all(map(is_, now.values(), before.values()))


class Attributes:
    """A snapshot of the plain attributes of modules, and of what is registered there: parameters,
    buffers, modules and hooks. `copies`: with the values of the attributes' tensors, which
    `tensor.data` can change without a trace."""

    def __init__(self, modules: Iterable[nn.Module], *, copies: bool = False) -> None:
        self._held: list[tuple[nn.Module, dict[str, Any]]] = []
        self._looks: list[tuple[nn.Module, str, Callable[[], bool]]] = []
        self._registries: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._empty: list[dict[Any, Any]] = []  # registries
        for module in modules:
            own = dict(module.__dict__)
            self._held.append((module, own))
            for name in _REGISTRIES & own.keys():
                if not isinstance(own[name], dict):  # of a scripted module
                    continue
                if own[name]:
                    self._registries.append((own[name], dict(own[name])))
                else:
                    self._empty.append(own[name])
            if len(own) == len(OF_MODULES):
                continue
            for name, value in own.items():
                if name in OF_MODULES:
                    continue
                look = _look(value, copies)
                if look is not None:
                    self._looks.append((module, name, look))

    def moved(self) -> list[str]:
        """The names of what was replaced, added or deleted."""
        pairs = [(module.__dict__, before) for module, before in self._held]
        pairs += [*self._registries, *((empty, {}) for empty in self._empty)]
        found = set[str]()
        for now, before in pairs:
            if _is_unchanged(now, before):
                continue
            names = now.keys() | before.keys()
            found |= {name for name in names if now.get(name, _held) is not before.get(name, _held)}
        return sorted(map(str, found))

    def rebind(self) -> list[str]:
        """Gives each attribute the object that it had, and each module what was registered: a
        forward may install hooks at its first call, and note that in an attribute. Returns the
        names of the parameters and buffers that were replaced or deleted."""
        replaced = []
        for module, before in self._held:
            if not _is_unchanged(module.__dict__, before):
                module.__dict__.clear()
                module.__dict__.update(before)
        for registry, known in self._registries:
            if not _is_unchanged(registry, known):
                tensors = (name for name, value in known.items() if isinstance(value, Tensor))
                replaced += [name for name in tensors if registry.get(name) is not known[name]]
                registry.clear()
                registry.update(known)
        if any(self._empty):
            for registry in self._empty:
                registry.clear()
        return replaced

    def put_back(self) -> None:
        """Restores the attributes of each module, and what is registered there.

        Raises:
          ValueError: a parameter or a buffer was replaced; or an object that an attribute holds was
            written to, which can't be undone here.
        """
        replaced = self.rebind()
        if replaced:
            raise ValueError(writes(replaced[0]))
        for module, name, look in self._looks:
            if not look():
                raise ValueError(keeps(f"{type(module).__name__}.{name}"))


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
def put_back(modules: Iterable[nn.Module], memory: Outside | None = None) -> Iterator[None]:
    """A context in which a forward may change the attributes of its modules, and what `memory`
    holds; at the end they are restored."""
    before = Attributes(modules)
    try:
        yield
    finally:
        try:
            before.put_back()
        finally:
            if memory is not None:
                memory.restore()


def keeps(name: str) -> str:
    """The message that refuses a model which carries state from one pass into the next."""
    return (
        f"the model's forward writes into its attribute {name}: what an example leaves there "
        "would reach steps in which it is absent, neither clipped nor noised. Take out what "
        "keeps it, or make it anew in each forward"
    )
