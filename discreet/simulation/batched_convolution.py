"""Convolutions and pooling of many models at once, on images with channels last: (k, n, height, width, channels).

A convolution is one matrix product a client: the patches that it reads are laid out as rows ("im2col"), and the
gradient of its weight is one product too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from discreet.privacy.rules.convolution import Geometry
from discreet.simulation.layers import Use

Pair = tuple[int, int]


@dataclass(frozen=True)
class ChannelsLast:
    """From images as data sets have them, (k, n, channels, height, width)."""

    def forward(self, params: list[Tensor], inputs: Tensor) -> tuple[Tensor, Any]:
        return inputs.movedim(2, -1), None

    def backward(
        self, params: list[Tensor], saved: Any, grads: Tensor, *, further: bool
    ) -> tuple[Tensor | None, list[Use]]:
        """Nothing comes before."""
        return None, []


@dataclass(frozen=True)
class Convolution:
    """A two-dimensional convolution with zero padding.

    Attributes:
        weight: the number of the weight, which is (k, out, height, width, channels).
        geometry: kernel, stride and padding as the model has them.
    """

    weight: int
    geometry: Geometry

    def forward(self, params: list[Tensor], inputs: Tensor) -> tuple[Tensor, Any]:
        clients, count, *image = inputs.shape
        patches = self.geometry.patches(inputs.flatten(0, 1).movedim(-1, 1))
        patches = patches.view(clients, count, *patches.shape[2:])
        weight = params[self.weight].flatten(2)
        outputs = torch.baddbmm(params[self.weight + 1].unsqueeze(1), patches.flatten(1, 2), weight.transpose(1, 2))
        return outputs.view(clients, count, *self.output_size((image[0], image[1])), -1), (patches, image)

    def backward(
        self, params: list[Tensor], saved: Any, grads: Tensor, *, further: bool
    ) -> tuple[Tensor | None, list[Use]]:
        patches, image = saved
        use = Use(self.weight, self.weight + 1, patches, grads.flatten(2, 3))
        if not further:
            return None, [use]
        back = torch.bmm(grads.flatten(1, 3), params[self.weight].flatten(2))
        return self._folded(back.view(*grads.shape[:4], *params[self.weight].shape[2:]), image), [use]

    def output_size(self, image: Pair) -> Pair:
        """Height and width of the output for an image of this height and width."""
        kernel, stride, padding = self.geometry.kernel, self.geometry.stride, self.geometry.padding
        height, width = (
            (length + sum(sides) - size) // step + 1
            for length, sides, size, step in zip(image, padding, kernel, stride, strict=True)
        )
        return height, width

    def _folded(self, back: Tensor, image: list[int]) -> Tensor:
        """The gradients at the image: each patch's added where it was read.

        back: (k, n, rows, columns, kernel height, kernel width, channels).
        """
        (rows, columns, tall, wide, channels), (height, width, _) = back.shape[2:], image
        ((top, bottom), (left, right)), (down, across) = self.geometry.padding, self.geometry.stride
        grads = back.new_zeros(*back.shape[:2], height + top + bottom, width + left + right, channels)
        for row in range(tall):
            for column in range(wide):
                read = grads[:, :, row : row + down * rows : down, column : column + across * columns : across]
                read += back[:, :, :, :, row, column]
        return grads[:, :, top : top + height, left : left + width]


@dataclass(frozen=True)
class MaxPool:
    """The largest value of each window of 2 x 2; its gradient goes to the first place that has it, row by row."""

    stride: Pair

    def forward(self, params: list[Tensor], inputs: Tensor) -> tuple[Tensor, Any]:
        left, right = self._pair(inputs, 3)
        across = torch.maximum(left, right)
        upper, lower = self._pair(across, 2)
        return torch.maximum(upper, lower), (inputs, across)

    def backward(
        self, params: list[Tensor], saved: Any, grads: Tensor, *, further: bool
    ) -> tuple[Tensor | None, list[Use]]:
        inputs, across = saved
        return self._spread(self._spread(grads, across, 2), inputs, 3), []

    def _pair(self, images: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """The first and the second place of every window along a dimension."""
        step = self.stride[dim - 2]
        count = (images.shape[dim] - 2) // step + 1
        first = images.narrow(dim, 0, (count - 1) * step + 1)
        second = images.narrow(dim, 1, (count - 1) * step + 1)
        if step == 1:
            return first, second
        index = (slice(None),) * dim + (slice(None, None, step),)
        return first[index], second[index]

    def _spread(self, grads: Tensor, images: Tensor, dim: int) -> Tensor:
        """Gradients of the larger of every pair, at the pair."""
        first, second = self._pair(images, dim)
        mine = torch.where(first >= second, grads, 0.0)
        back = torch.zeros_like(images)
        to_first, to_second = self._pair(back, dim)
        to_first += mine
        to_second += grads.sub_(mine)
        return back
