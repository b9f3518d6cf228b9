"""Code of one's own in a model, a loss or a metric, which may leave something of its examples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from discreet.per_example.attributes import HOOKS
from discreet.per_example.objective import is_of_package

if TYPE_CHECKING:
    from discreet.per_example.left_outside import Memory

OURS = ("torch", "discreet")
_FUNCTIONS = ("torch", "torch.nn.functional")
# Whose modules are taken to keep nothing of a pass's examples but in their own attributes.
_TRUSTED = (*OURS, "torchvision", "timm", "transformers", "peft")


def own_modules(modules: Iterable[nn.Module], others: tuple[str, ...] = OURS) -> list[nn.Module]:
    """The modules whose forward is of none of the `others`, or that have a hook."""
    return [
        module
        for module in modules
        if type(module).__module__.partition(".")[0] not in others
        or "forward" in module.__dict__
        or any(map(module.__dict__.__getitem__, HOOKS))
    ]


def memory_for(modules: Iterable[nn.Module], function: Any = None) -> Memory | None:
    """What the functions of modules, and of a loss or a metric, can write to; None if all are of
    PyTorch, Discreet and libraries of models."""
    modules = tuple(modules)
    own = own_modules(modules, _TRUSTED)
    if not own and _keeps_nothing(function):
        return None
    from discreet.per_example.left_outside import Memory

    return Memory(modules, function, own=own)


def _keeps_nothing(function: Any) -> bool:
    if isinstance(function, nn.Module):
        return not own_modules(function.modules())
    home = getattr(function, "__module__", "")
    return function is None or home in _FUNCTIONS or is_of_package(function)
