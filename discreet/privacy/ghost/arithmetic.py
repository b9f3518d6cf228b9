"""Rules for parameters in plain arithmetic: x @ W.T, x @ W, x + b and x * s, as hand-written layers have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from discreet.privacy.ghost.layers import last, linear, matrix_entries
from discreet.privacy.ghost.recorder import Records, Rule
from discreet.privacy.ghost.terms import Entry, Rows
from discreet.privacy.ghost.uncovered import Uncovered


def transpose(records: Records, input: Tensor) -> Tensor:
    """W.T: remembered, so that a product with it is seen for what it is."""
    outputs = input.t() if input.dim() <= 2 else input.mT
    if input.dim() == 2 and records.slot(input):
        records.transposed[id(outputs)] = (outputs, input)
        return outputs
    records.refuse(input)
    return outputs


def matmul(records: Records, input: Tensor, other: Tensor) -> Tensor:
    """x @ W.T is a linear layer; in x @ W, whose gradient is A^T B, the roles of inputs and gradients change."""
    if id(other) in records.transposed:
        return linear(records, input, records.transposed[id(other)][1])
    records.refuse(input)
    outputs = torch.matmul(input, other)
    slot = records.slot(other)
    if slot is None:
        records.refuse(other)
        return outputs
    if other.dim() != 2:
        raise Uncovered("a product with a parameter that is no matrix")
    records.add(input, outputs, lambda grads: matrix_entries(slot, None, grads, input))
    return outputs


def _broadcast(combine: Callable[[Any, Any], Tensor], gradient: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    """The rule of an operation on data (n, positions..., *shape) and a parameter of that shape, in either order."""

    def rule(records: Records, input: Any, other: Any, *rest: Any, **more: Any) -> Tensor:
        if rest or more:
            records.refuse(input, other)
            return combine(input, other, *rest, **more)
        outputs = combine(input, other)
        if not records.holds_parameter((input, other)):
            return outputs
        data, parameter = (other, input) if records.slot(input) else (input, other)
        records.refuse(data)
        slot = records.slot(parameter)
        if slot is None or not isinstance(data, Tensor) or data.shape != outputs.shape or data.dim() <= len(slot.shape):
            raise Uncovered("a parameter combined with data in another way than by broadcasting over examples")
        if data.shape[data.dim() - len(slot.shape) :] != slot.shape:
            raise Uncovered("a parameter combined with data of another shape")
        gather = last(len(slot.shape))

        def entries(grads: Tensor) -> list[Entry]:
            return [Rows(slot, gather(gradient(grads, data)))]

        records.add(data, outputs, entries)
        return outputs

    return rule


add = _broadcast(torch.add, lambda grads, data: grads)
multiply = _broadcast(torch.mul, lambda grads, data: grads * data)

ARITHMETIC_RULES: dict[Any, Rule] = {
    Tensor.T.__get__: transpose,  # type: ignore[attr-defined]
    Tensor.mT.__get__: transpose,  # type: ignore[attr-defined]
    Tensor.t: transpose,
    torch.t: transpose,
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), matmul),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), add),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), multiply),
}
