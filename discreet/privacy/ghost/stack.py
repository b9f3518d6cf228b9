"""Plain stacks of linear layers, forward and backward by hand.

On small models autograd and the watching of calls cost as much as the products do. A stack of the layers below needs
neither, and gives the same entries as a recorded pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from discreet.privacy.ghost.terms import Entry, Pair, Slot

Step = Callable[[nn.Module, Tensor], Tensor]
Back = Callable[[nn.Module, Tensor, Tensor], Tensor]  # from the layer, its outputs and the gradients there

# Autograd's own: a product with a mask takes eight times as long.
_relu_backward = torch.ops.aten.threshold_backward.default

_FORWARD: dict[type[nn.Module], Step] = {
    nn.Flatten: lambda layer, values: values.flatten(layer.start_dim, layer.end_dim),  # type: ignore[arg-type]
    nn.Linear: lambda layer, values: torch.nn.functional.linear(values, layer.weight, layer.bias),  # type: ignore[arg-type]
    nn.ReLU: lambda layer, values: values.relu(),
    nn.Tanh: lambda layer, values: values.tanh(),
}
_BACKWARD: dict[type[nn.Module], Back] = {
    nn.Linear: lambda layer, outputs, grads: grads @ layer.weight,  # type: ignore[operator]
    nn.ReLU: lambda layer, outputs, grads: _relu_backward(grads, outputs, 0),
    nn.Tanh: lambda layer, outputs, grads: torch.addcmul(grads, grads * outputs, outputs, value=-1),
}


def plain_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a Sequential of an optional Flatten and then Linear, ReLU and Tanh, none with hooks; else none."""
    if type(model) is not nn.Sequential or _is_customised(model):
        return []
    layers = list(model)
    inner = layers[1:] if layers and type(layers[0]) is nn.Flatten else layers
    plain = all(type(layer) in _BACKWARD for layer in inner) and not any(map(_is_customised, layers))
    return layers if plain else []


def _is_customised(layer: nn.Module) -> bool:
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return bool(hooks) or "forward" in layer.__dict__


def stacked_forward(layers: list[nn.Module], inputs: Tensor) -> list[Tensor]:
    """The inputs and what each layer makes of them; empty where linear layers would meet anything but rows (n, d)."""
    values = [inputs]
    for layer in layers:
        if values[-1].dim() != 2 and type(layer) is not nn.Flatten:
            return []
        values.append(_FORWARD[type(layer)](layer, values[-1]))
    return values


def stacked_backward(
    layers: list[nn.Module], values: list[Tensor], grads: Tensor, *, slots: Mapping[int, Slot]
) -> list[Entry]:
    """Entries of all linear layers, first layer first, from the gradients at the outputs, (n, classes)."""
    first = next((index for index, layer in enumerate(layers) if type(layer) is nn.Linear), len(layers))
    entries: list[Entry] = []
    for index in range(len(layers) - 1, first - 1, -1):
        layer = layers[index]
        if type(layer) is nn.Linear:
            weight, bias = slots.get(id(layer.weight)), slots.get(id(layer.bias))
            if weight or bias:
                entries.append(Pair(weight, bias, values[index], grads))
        if index > first:
            grads = _BACKWARD[type(layer)](layer, values[index + 1], grads)
    return entries[::-1]
