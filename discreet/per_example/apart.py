"""A model whose forward may leave something of its examples anywhere: what one client or example
leaves is undone, so that it reaches no other."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from discreet.per_example.attributes import HOOKS, Attributes

if TYPE_CHECKING:
    from discreet.per_example.left_outside import Memory

_OURS = ("torch", "discreet")  # whose forwards and losses leave nothing outside of the model


def memory_for(model: nn.Module, function: Any = None) -> Memory | None:
    """What the functions of a model, a loss or a metric can write to; None if all are of PyTorch
    and Discreet."""
    parts = [*map(type, model.modules()), *([] if function is None else [function])]
    hooked = any(getattr(module, name, None) for module in model.modules() for name in HOOKS)
    if not hooked and all(_root(part) in _OURS for part in parts):
        return None
    from discreet.per_example.left_outside import Memory

    return Memory(model.modules(), function)


def _root(part: Any) -> str:
    return str(getattr(part, "__module__", "")).partition(".")[0]


class Snapshot:
    """A model as it is now, and what `memory`, that of `memory_for`, holds."""

    def __init__(self, model: nn.Module, memory: Memory | None) -> None:
        held = [*model.parameters(), *model.buffers()]
        self._held = [(value, value.detach().clone()) for value in held]
        self._attributes = Attributes(model.modules())
        self._memory = memory

    @torch.no_grad()
    def restore(self) -> bool:
        """Undoes all changes. True if there were some besides those of parameters and buffers."""
        is_changed = bool(self._attributes.moved())
        self._attributes.rebind()
        is_changed |= self.restore_outside()
        for value, kept in self._held:
            value.copy_(kept)
        return is_changed

    def restore_outside(self) -> bool:
        """Undoes the changes of what the memory holds. True if there were some."""
        return self._memory is not None and self._memory.restore()


@contextmanager
def apart(model: nn.Module) -> Iterator[nn.Module]:
    """A context with a copy of a model for one client or example. What it leaves outside of the
    copy is undone at the end. A model that can't be copied is used itself, and put back."""
    own = model
    with suppress(Exception):
        own = copy.deepcopy(model)
    memory = memory_for(own)
    before = Snapshot(own, memory) if own is model else memory
    try:
        yield own
    finally:
        if before is not None:
            before.restore()
