"""Batched layers, of many models at once: row c of every tensor belongs to client c, whose parameters are its own.

Each layer has its forward and its backward pass by hand: with a model of a few small matrices for each client, what an
automatic derivative adds would cost more than the products themselves. Against `torch.func.vmap` over the clients this
wins 3 times (logistic regression), 3 (MLP, with `chunk.py`) and 1.8 (CNN) with plain SGD, and 2.5, 4 and 1.6 times with
DP-SGD.

Shapes: k clients, n examples each. Images stand with their channels last, (k, n, height, width, channels). A
convolution is a linear layer on the patches that it reads, laid out as rows ("im2col").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from discreet.per_example.convolution import Geometry

_pool_backward = torch.ops.aten.max_pool2d_with_indices_backward.default

Pair = tuple[int, int]
Params = list[Tensor]  # of a whole model, each (k, ...)


@dataclass(frozen=True, slots=True)
class Use:
    """A layer's inputs and the gradients at its outputs, which make up the gradients of its weight and its bias.

    The gradient of example i of client c is grads[c, i]^T inputs[c, i] for the weight, and the sum of grads[c, i] over
    positions for the bias.

    Attributes:
        weight: the number of the weight among the parameters. The bias is the next one.
        inputs: (k, n, positions, width).
        grads: (k, n, positions, out).
    """

    weight: int
    inputs: Tensor
    grads: Tensor


Backward = tuple[Tensor | None, list[Use]]


class Layer(Protocol):
    """A layer of many models. `saved` is what forward hands to backward."""

    def forward(self, params: Params, inputs: Tensor) -> tuple[Tensor, Any]:
        """Outputs, and what backward needs."""

    def backward(self, params: Params, saved: Any, grads: Tensor, *, further: bool) -> Backward:
        """The gradients at the inputs (not needed unless `further`), and what the layer's own are made of."""


@dataclass(frozen=True)
class Dense:
    """A linear layer on the last dimension of (k, n, ..., width): also on patches of a convolution.

    Weights are (k, out, ...), with `width` numbers an output; biases (k, out).
    """

    weight: int

    def forward(self, params: Params, inputs: Tensor) -> tuple[Tensor, Any]:
        rows, weight = inputs.flatten(1, -2), params[self.weight].flatten(2)
        outputs = torch.baddbmm(params[self.weight + 1].unsqueeze(1), rows, weight.transpose(1, 2))
        return outputs.view(*inputs.shape[:-1], -1), rows

    def backward(self, params: Params, saved: Any, grads: Tensor, *, further: bool) -> Backward:
        by_example = (*grads.shape[:2], -1)
        inputs = saved.view(*by_example, saved.shape[-1])
        use = Use(self.weight, inputs, grads.reshape(*by_example, grads.shape[-1]))
        if not further:
            return None, [use]
        before = torch.bmm(grads.flatten(1, -2), params[self.weight].flatten(2))
        return before.view(*grads.shape[:-1], -1), [use]


@dataclass(frozen=True)
class Activation:
    """A function of each number, in place, and its derivative by the outputs."""

    function: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor, Tensor], Tensor]

    def forward(self, params: Params, inputs: Tensor) -> tuple[Tensor, Any]:
        outputs = self.function(inputs)
        return outputs, outputs

    def backward(self, params: Params, saved: Any, grads: Tensor, *, further: bool) -> Backward:
        return self.derivative(grads, saved), []


RELU = Activation(torch.relu_, partial(torch.ops.aten.threshold_backward.default, threshold=0))
TANH = Activation(torch.tanh_, torch.ops.aten.tanh_backward.default)


@dataclass(frozen=True)
class Flatten:
    """From (k, n, ...) to (k, n, width)."""

    def forward(self, params: Params, inputs: Tensor) -> tuple[Tensor, Any]:
        return inputs.flatten(2), inputs.shape

    def backward(self, params: Params, saved: Any, grads: Tensor, *, further: bool) -> Backward:
        return grads.view(saved), []


@dataclass(frozen=True)
class Permute:
    """Dimensions in another order."""

    order: tuple[int, ...]

    def forward(self, params: Params, inputs: Tensor) -> tuple[Tensor, Any]:
        return inputs.permute(self.order), None

    def backward(self, params: Params, saved: Any, grads: Tensor, *, further: bool) -> Backward:
        back = [self.order.index(dim) for dim in range(len(self.order))]
        return grads.permute(back).contiguous(), []


CHANNELS_LAST = Permute((0, 1, 3, 4, 2))  # from images as data sets have them, (k, n, channels, height, width)


@dataclass(frozen=True)
class Patches:
    """The patches that a two-dimensional convolution with zero padding reads, for a `Dense` layer:
    (k, n, height, width, channels) to (k, n, rows, columns, kernel height * kernel width * channels)."""

    geometry: Geometry

    def forward(self, params: Params, inputs: Tensor) -> tuple[Tensor, Any]:
        patches = self.geometry.patches(inputs.flatten(0, 1).movedim(-1, 1))
        return patches.view(*inputs.shape[:2], *self.positions(inputs.shape[2:4]), patches.shape[-1]), inputs.shape[2:4]

    def backward(self, params: Params, saved: Any, grads: Tensor, *, further: bool) -> Backward:
        """The gradients at the image: each patch's are added where it was read."""
        (tall, wide), (rows, columns), (height, width) = self.geometry.kernel, grads.shape[2:4], saved
        ((top, bottom), (left, right)), (down, across) = self.geometry.padding, self.geometry.stride
        by_place = grads.view(*grads.shape[:4], tall, wide, -1)
        image = grads.new_zeros(*grads.shape[:2], height + top + bottom, width + left + right, by_place.shape[-1])
        for row in range(tall):
            for column in range(wide):
                read = image[:, :, row : row + down * rows : down, column : column + across * columns : across]
                read += by_place[:, :, :, :, row, column]
        return image[:, :, top : top + height, left : left + width], []

    def positions(self, image: tuple[int, ...]) -> list[int]:
        """The rows and columns of patches in an image of this height and width."""
        ways = zip(image, self.geometry.padding, self.geometry.kernel, self.geometry.stride, strict=True)
        return [(length + sum(sides) - size) // step + 1 for length, sides, size, step in ways]


@dataclass(frozen=True)
class MaxPool:
    """The largest value of each window of 2 x 2, by PyTorch, which reads images whose channels are last as they are."""

    stride: Pair

    def forward(self, params: Params, inputs: Tensor) -> tuple[Tensor, Any]:
        images = inputs.flatten(0, 1).permute(0, 3, 1, 2)
        outputs, places = functional.max_pool2d(images, 2, self.stride, return_indices=True)
        return outputs.permute(0, 2, 3, 1).view(*inputs.shape[:2], *outputs.shape[2:], -1), (images, places)

    def backward(self, params: Params, saved: Any, grads: Tensor, *, further: bool) -> Backward:
        images, places = saved
        given = grads.flatten(0, 1).permute(0, 3, 1, 2)
        back = _pool_backward(given, images, [2, 2], list(self.stride), [0, 0], [1, 1], False, places)
        return back.permute(0, 2, 3, 1).view(*grads.shape[:2], *images.shape[2:], -1), []
