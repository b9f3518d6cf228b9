"""Plain attributes of modules: changes by a pass are undone, so that they reach no other pass.

A clipped sum bounds the influence of an example on the gradients, and on nothing else. A running
maximum, a queue or a stored mean would carry an example into steps in which it is absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any, Protocol

from torch import Tensor, nn

from discreet.layers.model_state import writes


class Outside(Protocol):
    """What lies outside of modules, as it was."""

    def restore(self) -> bool:
        """Undoes all changes. True if there were some."""


NUMBERS = (bool, int, float, str)
OF_MODULES = frozenset(nn.Module().__dict__)
_NO_NUMBERS = OF_MODULES - {
    name for name, value in nn.Module().__dict__.items() if type(value) in NUMBERS
}
HOOKS = frozenset(name for name in nn.Module().__dict__ if "hooks" in name)
_REGISTRIES = HOOKS | {"_parameters", "_buffers", "_modules"}
# Whose modules are taken to keep nothing of a pass's examples but in their own attributes.
MODELS = ("torchvision", "timm", "transformers", "peft")
GLOBAL_HOOKS: list[dict[int, Any]] = [
    held
    for name, held in vars(nn.modules.module).items()
    if name.startswith("_global_") and "hooks" in name
]


def package_of(module: object) -> str:
    """The package of a module's name."""
    return str(module).partition(".")[0]


def packages_of(function: Any) -> frozenset[str]:
    """The packages of a function: that of the name that it bears, which functools.wraps copies, and
    that of its code."""
    module = function.__module__
    names = getattr(function, "__globals__", {})
    return frozenset({package_of(module), package_of(names.get("__name__", module))})


def is_unchanged(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    """True if a dictionary has the same names in order, with the same objects."""
    return list(now) == list(before) and all(map(is_, now.values(), before.values()))


class Attributes:
    """A snapshot of the plain attributes of modules, and of what is registered there: parameters,
    buffers, modules and hooks."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._held: list[tuple[nn.Module, dict[str, Any]]] = []
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

    def moved(self) -> list[str]:
        """The names of what was replaced, added or deleted."""
        pairs = [(module.__dict__, before) for module, before in self._held]
        pairs += [*self._registries, *((empty, {}) for empty in self._empty)]
        found = set[str]()
        for now, before in pairs:
            if is_unchanged(now, before):
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
            if not is_unchanged(module.__dict__, before):
                module.__dict__.clear()
                module.__dict__.update(before)
        for registry, known in self._registries:
            if not is_unchanged(registry, known):
                tensors = (name for name, value in known.items() if isinstance(value, Tensor))
                replaced += [name for name in tensors if registry.get(name) is not known[name]]
                registry.clear()
                registry.update(known)
        if any(self._empty):
            for registry in self._empty:
                registry.clear()
        return replaced


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
    holds; at the end they are restored. Raises ValueError: it replaces a parameter or a buffer."""
    before = Attributes(modules)
    try:
        yield
    finally:
        replaced = before.rebind()
        if memory is not None:
            memory.restore()
    if replaced:
        raise ValueError(writes(replaced[0]))


def keeps(name: str) -> str:
    """The message that refuses a model which carries state from one pass into the next."""
    return (
        f"the model's forward writes into its attribute {name}: what an example leaves there "
        "would reach steps in which it is absent, neither clipped nor noised. Take out what "
        "keeps it, or make it anew in each forward"
    )
