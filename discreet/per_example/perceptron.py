"""Perceptrons by hand: Linear with ReLU or tanh.

On such small models autograd costs as much as the products do. Without it a clipped sum takes a fifth less time
(benchmarks/per_example_speed.py), and the terms are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from discreet.per_example.objective import logit_gradients
from discreet.per_example.terms import Pair, Slot, Term

Back = Callable[[nn.Module, Tensor, Tensor], Tensor]  # from the layer, its outputs and the gradients there

# Autograd's own: a product with a mask takes eight times as long.
_relu_backward = torch.ops.aten.threshold_backward.default

_BACKWARD: dict[type[nn.Module], Back] = {
    nn.Linear: lambda layer, outputs, grads: grads @ layer.weight,  # type: ignore[operator]
    nn.ReLU: lambda layer, outputs, grads: _relu_backward(grads, outputs, 0),
    nn.Tanh: lambda layer, outputs, grads: torch.addcmul(grads, grads * outputs, outputs, value=-1),
}


def perceptron(model: nn.Module, inputs: object) -> list[nn.Module] | None:
    """The layers of a model that is Linear, ReLU and Tanh on rows (n, d), behind an nn.Flatten() if there is one."""
    layers = _in_series(model)
    if not layers or not isinstance(inputs, Tensor) or not all(map(unchanged, layers)):
        return None
    first = layers[0]
    flat = type(first) is nn.Flatten and (first.start_dim, first.end_dim) == (1, -1)
    inner = layers[1:] if flat else layers
    return layers if (flat or inputs.dim() == 2) and all(type(layer) in _BACKWARD for layer in inner) else None


def _in_series(model: nn.Module) -> list[nn.Module]:
    if type(model) is nn.Sequential and unchanged(model):
        return [layer for part in model for layer in _in_series(part)]
    return [model]


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


def unchanged(layer: nn.Module) -> bool:
    """True if a layer does what its class says: it has no hooks and no forward of its own."""
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return not hooks and "forward" not in layer.__dict__
