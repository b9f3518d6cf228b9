"""Tensors as they were: their numbers and memory, how gradients see them, and their attributes."""

from __future__ import annotations

from contextlib import suppress
from operator import is_
from typing import Any

import torch
from torch import Tensor

from discreet.layers.refusals import CONFUSED
from discreet.per_example.attributes import is_unchanged

_COPIED = 2**16  # numbers; a larger tensor is known by its version


class KeptTensor:
    """A tensor as it is now. `whole`: its numbers can be restored, however many they are."""

    def __init__(self, value: Tensor, *, whole: bool = False) -> None:
        self.value = value
        self._alias = value.data  # its memory, whatever that of `value` becomes
        self._memory = _memory_of(value)
        self._gradient = gradient_of(value)
        self._attributes = dict(value.__dict__)
        self._version = _version_of(value)
        self._numbers: Tensor | None = None
        if whole or value.numel() <= _COPIED:
            self._numbers = value.detach().clone()

    def restore(self) -> bool:
        """Undoes all changes besides those of the numbers. True if there were some."""
        value = self.value
        is_moved = _memory_of(value) != self._memory
        if is_moved:
            value.data = self._alias
        gradient = gradient_of(value)
        is_same = len(gradient) == len(self._gradient) and all(map(is_, gradient, self._gradient))
        if not is_same or not is_unchanged(value.__dict__, self._attributes):
            put_back_gradient(value, self._gradient, self._attributes)
            return True
        return is_moved

    def restore_numbers(self) -> bool:
        """Undoes changes of the numbers. True if there were some. ValueError: they have no copy."""
        value = self.value
        if self._numbers is None:
            if _version_of(value) != self._version:
                raise ValueError(f"{value.numel()} numbers were written to")
            return False
        with suppress(*CONFUSED):  # it is sparse
            if torch.equal(value, self._numbers):
                return False
        try:
            value.copy_(self._numbers)
        except RuntimeError:  # several entries have one place in memory
            value.data = self._numbers.clone()
        return True


def gradient_of(value: Tensor) -> tuple[Any, ...]:
    """If a tensor has a gradient, the one that was added up there, and its hooks: their dictionary,
    and its keys and values."""
    grad = value.grad if value.is_leaf else None
    hooks = value._backward_hooks
    return value.requires_grad, grad, hooks, *(hooks or {}).keys(), *(hooks or {}).values()


def put_back_gradient(value: Tensor, gradient: tuple[Any, ...], attributes: dict[str, Any]) -> None:
    """Gives a tensor what `gradient_of` said, and its attributes."""
    requires_grad, grad, hooks, *held = gradient
    if value.requires_grad != requires_grad:
        value.requires_grad_(requires_grad)
    if value.is_leaf and value.grad is not grad:
        value.grad = grad
    if value._backward_hooks is not hooks:
        value._backward_hooks = hooks
    if hooks is not None:
        count = len(held) // 2
        hooks.clear()
        hooks.update(zip(held[:count], held[count:], strict=True))
    value.__dict__.clear()
    value.__dict__.update(attributes)


def _memory_of(value: Tensor) -> tuple[Any, ...]:
    if value.layout != torch.strided or value.is_meta:
        return value.dtype, value.shape
    return value.dtype, value.shape, value.stride(), value.data_ptr()


def _version_of(value: Tensor) -> int:
    return 0 if value.is_inference() else value._version
