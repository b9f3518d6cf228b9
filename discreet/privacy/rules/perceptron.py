"""Linear layers with ReLU or tanh between them, forward and backward by hand.

On such small models autograd costs as much as the products do: by hand a clipped sum takes a fifth less time
(benchmarks/per_example_speed.py). The terms are those of `one_pass`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from discreet.privacy.rules.objective import logit_gradients
from discreet.privacy.rules.terms import Pair, Slot, Term

Back = Callable[[nn.Module, Tensor, Tensor], Tensor]  # from the layer, its outputs and the gradients there

# Autograd's own: a product with a mask takes eight times as long.
_relu_backward = torch.ops.aten.threshold_backward.default

_BACKWARD: dict[type[nn.Module], Back] = {
    nn.Linear: lambda layer, outputs, grads: grads @ layer.weight,  # type: ignore[operator]
    nn.ReLU: lambda layer, outputs, grads: _relu_backward(grads, outputs, 0),
    nn.Tanh: lambda layer, outputs, grads: torch.addcmul(grads, grads * outputs, outputs, value=-1),
}


def is_perceptron(layers: Sequence[nn.Module], inputs: Tensor) -> bool:
    """Whether the layers are Linear, ReLU and Tanh on rows (n, d), behind an nn.Flatten() if there is one."""
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
