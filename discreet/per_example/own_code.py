"""Code of one's own in a model, a loss or a metric, which may leave something of its examples."""

from __future__ import annotations

from collections.abc import Iterable
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from torch import nn

from discreet.per_example.attributes import (
    GLOBAL_HOOKS,
    HOOKS,
    MODELS,
    package_of,
    packages_of,
)
from discreet.per_example.objective import is_of_package

if TYPE_CHECKING:
    from discreet.per_example.memory import Memory

_FUNCTIONS = (FunctionType, MethodType)
OURS = ("builtins", "collections", "torch", "discreet")


def has_own_code(modules: Iterable[nn.Module], trusted: tuple[str, ...] = OURS) -> bool:
    """True if a forward, a hook, or a function or an object that is an attribute is not of a
    package that is trusted."""
    kinds = set[type]()
    for module in modules:
        held = module.__dict__
        kinds.add(type(module))
        kinds.update(map(type, held.values()))
        kinds.update(map(type, module._parameters.values()))
        if "forward" in held or any(map(held.__getitem__, HOOKS)):
            return True
        if not kinds.isdisjoint(_FUNCTIONS):
            kinds.difference_update(_FUNCTIONS)
            functions = [each for each in held.values() if isinstance(each, _FUNCTIONS)]
            if not all(packages_of(each).issubset(trusted) for each in functions):
                return True
    return any(GLOBAL_HOOKS) or any(package_of(kind.__module__) not in trusted for kind in kinds)


def memory_for(
    modules: Iterable[nn.Module], function: Any = None, *, whole: bool = True
) -> Memory | None:
    """`Memory` of what the functions of modules, and of a loss or a metric, can write to; None if
    they keep nothing."""
    modules = tuple(modules)
    if keeps_nothing(modules, function):
        return None
    from discreet.per_example.memory import Memory

    return Memory(modules, function, whole=whole)


def keeps_nothing(modules: Iterable[nn.Module], function: Any = None) -> bool:
    """True if the functions of modules, and a loss or a metric, are of PyTorch, Discreet and
    libraries of models."""
    return _is_known(function) and not has_own_code(modules, (*OURS, *MODELS))


def _is_known(function: Any) -> bool:
    if isinstance(function, nn.Module):
        return not has_own_code(function.modules())
    if function is None or is_of_package(function):
        return True
    home = getattr(function, "__module__", "")
    return home in ("torch", "torch.nn.functional") and packages_of(function) == {"torch"}
