"""Layers of many models at once: row c of every tensor belongs to client c, whose parameters are its own.

Each layer has its forward and its backward pass by hand: with a model of a few small matrices for each client, what an
automatic derivative adds would cost more than the products themselves.

Shapes: k clients, n examples each. Images stand with their channels last, (k, n, height, width, channels).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

_tanh_backward = torch.ops.aten.tanh_backward.default
_relu_backward = torch.ops.aten.threshold_backward.default


@dataclass(frozen=True, slots=True)
class Use:
    """What the gradient of a layer's weight and bias is made of: the layer's inputs and the gradients at its outputs.

    The gradient of example i of client c is grads[c, i]^T inputs[c, i] for the weight, and the sum of grads[c, i] over
    positions for the bias.

    Attributes:
        weight: the number of the weight among the parameters.
        bias: the number of its bias; None where it has none.
        inputs: (k, n, positions, width).
        grads: (k, n, positions, out).
    """

    weight: int
    bias: int | None
    inputs: Tensor
    grads: Tensor


class Layer(Protocol):
    """A layer of many models. `saved` is what forward hands to backward."""

    def forward(self, params: list[Tensor], inputs: Tensor) -> tuple[Tensor, Any]:
        """Outputs, and what backward needs."""

    def backward(
        self, params: list[Tensor], saved: Any, grads: Tensor, *, further: bool
    ) -> tuple[Tensor | None, list[Use]]:
        """The gradients at the inputs (None unless `further`), and what the layer's own are made of."""


@dataclass(frozen=True)
class Dense:
    """A linear layer on (k, n, ...), flattened to (k, n, width). Weights are (k, out, width), biases (k, out)."""

    weight: int

    def forward(self, params: list[Tensor], inputs: Tensor) -> tuple[Tensor, Any]:
        """See `Layer`."""
        flat = inputs.flatten(2)
        weight = params[self.weight].flatten(2)
        outputs = torch.baddbmm(params[self.weight + 1].unsqueeze(1), flat, weight.transpose(1, 2))
        return outputs, (flat, inputs.shape)

    def backward(
        self, params: list[Tensor], saved: Any, grads: Tensor, *, further: bool
    ) -> tuple[Tensor | None, list[Use]]:
        """See `Layer`."""
        flat, shape = saved
        use = Use(self.weight, self.weight + 1, flat.unsqueeze(2), grads.unsqueeze(2))
        before = torch.bmm(grads, params[self.weight].flatten(2)).view(shape) if further else None
        return before, [use]


@dataclass(frozen=True)
class Relu:
    """max(x, 0)."""

    def forward(self, params: list[Tensor], inputs: Tensor) -> tuple[Tensor, Any]:
        """See `Layer`."""
        outputs = inputs.relu_()
        return outputs, outputs

    def backward(
        self, params: list[Tensor], saved: Any, grads: Tensor, *, further: bool
    ) -> tuple[Tensor | None, list[Use]]:
        """See `Layer`."""
        return _relu_backward(grads, saved, 0), []


@dataclass(frozen=True)
class Tanh:
    """tanh(x)."""

    def forward(self, params: list[Tensor], inputs: Tensor) -> tuple[Tensor, Any]:
        """See `Layer`."""
        outputs = inputs.tanh_()
        return outputs, outputs

    def backward(
        self, params: list[Tensor], saved: Any, grads: Tensor, *, further: bool
    ) -> tuple[Tensor | None, list[Use]]:
        """See `Layer`."""
        return _tanh_backward(grads, saved), []
