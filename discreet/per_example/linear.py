"""Linear layers, and perceptrons by hand: Linear with ReLU or tanh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from discreet.per_example.objective import logit_gradients
from discreet.per_example.terms import Outer, Pair, Rows, Slot, Tape, Term


def product_terms(weight: Slot | None, bias: Slot | None, inputs: Tensor, grads: Tensor, order: int) -> list[Term]:
    """Terms for outputs = inputs @ weight.T + bias; inputs (n, ..., d), grads (n, ..., p)."""
    if grads.dim() == 2:
        return [Pair(weight, bias, inputs, grads)]
    grads = grads.flatten(1, -2)
    terms: list[Term] = [] if weight is None else [Outer(weight, inputs.flatten(1, -2), grads).cheapest(order)]
    return terms if bias is None else [*terms, Rows(bias, grads.sum(1))]


def affine(tape: Tape, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """inputs @ weight.T + bias, noted on the tape."""
    tape.rows(inputs, least=2)
    outputs = functional.linear(inputs, weight, bias)
    weight_slot, bias_slot = tape.slot(weight), tape.slot(bias)
    if weight_slot or bias_slot:
        tape.add(outputs, lambda grads: product_terms(weight_slot, bias_slot, inputs, grads, tape.order))
    return outputs


def linear(tape: Tape, layer: nn.Linear, inputs: Tensor) -> Tensor:
    return affine(tape, inputs, layer.weight, layer.bias)


# Perceptrons by hand: on such small models autograd costs as much as the products do. Without it a clipped sum takes a
# fifth less time (benchmarks/per_example_speed.py), and the terms are the same.
Back = Callable[[nn.Module, Tensor, Tensor], Tensor]  # from the layer, its outputs and the gradients there

# Autograd's own: a product with a mask takes eight times as long.
_relu_backward = torch.ops.aten.threshold_backward.default

_BACKWARD: dict[type[nn.Module], Back] = {
    nn.Linear: lambda layer, outputs, grads: grads @ layer.weight,  # type: ignore[operator]
    nn.ReLU: lambda layer, outputs, grads: _relu_backward(grads, outputs, 0),
    nn.Tanh: lambda layer, outputs, grads: torch.addcmul(grads, grads * outputs, outputs, value=-1),
}


def is_perceptron(layers: Sequence[nn.Module], inputs: Tensor) -> bool:
    """True if the layers are Linear, ReLU and Tanh on rows (n, d), behind an nn.Flatten() if there is one."""
    flat = bool(layers) and type(layers[0]) is nn.Flatten and (layers[0].start_dim, layers[0].end_dim) == (1, -1)
    inner = layers[1:] if flat else layers
    return (flat or inputs.dim() == 2) and all(type(layer) in _BACKWARD for layer in inner)


def perceptron_terms(
    layers: Sequence[nn.Module], inputs: Tensor, targets: Tensor, *, slots: Mapping[int, Slot]
) -> list[Term]:
    """Terms of all linear layers, first layer first, for the cross-entropy. Gradients must be switched off."""
    values = [inputs]
    for layer in layers:
        values.append(layer(values[-1]))
    grads = logit_gradients(values[-1], targets)
    first = next((index for index, layer in enumerate(layers) if type(layer) is nn.Linear), len(layers))
    terms: list[Term] = []
    for index in range(len(layers) - 1, first - 1, -1):
        layer = layers[index]
        if type(layer) is nn.Linear:
            weight, bias = slots.get(id(layer.weight)), slots.get(id(layer.bias))
            if weight or bias:
                terms.append(Pair(weight, bias, values[index], grads))
        if index > first:
            grads = _BACKWARD[type(layer)](layer, values[index + 1], grads)
    return terms[::-1]
