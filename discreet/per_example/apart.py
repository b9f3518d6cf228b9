"""A model whose forward may leave something of its examples anywhere: what one client or example
leaves is undone, so that it reaches no other."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from discreet.per_example.attributes import Attributes
from discreet.per_example.kept_tensors import KeptTensor
from discreet.per_example.own_code import memory_for

if TYPE_CHECKING:
    from discreet.per_example.memory import Memory


class Snapshot:
    """A model as it is now, and what `memory`, that of `memory_for`, holds."""

    def __init__(self, model: nn.Module, memory: Memory | None) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        self._tensors = [KeptTensor(value, whole=True) for value in tensors]
        self._attributes = Attributes(model.modules())
        self._memory = memory

    @torch.no_grad()
    def restore(self) -> bool:
        """Undoes all changes. True if there were some besides those of numbers in parameters and
        buffers."""
        changes = [bool(self._attributes.moved())]
        self._attributes.rebind()
        changes += [each.restore() for each in self._tensors]
        for each in self._tensors:
            each.restore_numbers()
        if self._memory is not None:
            changes.append(self._memory.restore())
        return any(changes)


@contextmanager
def undone(model: nn.Module, function: Any = None) -> Iterator[nn.Module]:
    """A context with a model. What code of one's own in it, or in a loss, leaves anywhere is undone
    at the end."""
    memory = memory_for(model.modules(), function)
    before = None if memory is None else Snapshot(model, memory)
    try:
        yield model
    finally:
        if before is not None:
            before.restore()


@contextmanager
def apart(model: nn.Module) -> Iterator[nn.Module]:
    """A context with a copy of a model for one client or example. What it leaves outside of the
    copy is undone at the end. A model that can't be copied is used itself, and put back."""
    own = model
    with suppress(Exception):
        own = copy.deepcopy(model)
    memory = memory_for(own.modules())
    before = Snapshot(own, memory) if own is model else memory
    try:
        yield own
    finally:
        if before is not None:
            before.restore()
