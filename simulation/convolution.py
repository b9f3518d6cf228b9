"""Convolutions and pooling of many models at once, on images with channels last: (k, n, height, width, channels).

A convolution is one matrix product a client: the patches that it reads are laid out as rows (columns of "im2col"), which
also makes the gradient of its weight one product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from simulation.layers import Use

_pool = torch.ops.aten.max_pool2d_with_indices.default
_pool_backward = torch.ops.aten.max_pool2d_with_indices_backward.default

Pair = tuple[int, int]


@dataclass(frozen=True)
class ChannelsLast:
    """From images as data sets have them, (k, n, channels, height, width)."""

    def forward(self, params: list[Tensor], inputs: Tensor) -> tuple[Tensor, Any]:
        """See `simulation.layers.Layer`."""
        return inputs.movedim(2, -1), None

    def backward(
        self, params: list[Tensor], saved: Any, grads: Tensor, *, further: bool
    ) -> tuple[Tensor | None, Use | None]:
        """See `simulation.layers.Layer`. Nothing comes before."""
        return None, None


@dataclass(frozen=True)
class Convolution:
    """A two-dimensional convolution with zero padding. Weights are (k, out, height, width, channels)."""

    weight: int
    kernel: Pair
    stride: Pair
    padding: Pair

    def forward(self, params: list[Tensor], inputs: Tensor) -> tuple[Tensor, Any]:
        """See `simulation.layers.Layer`."""
        clients, count, *image = inputs.shape
        patches = self._patches(self._padded(inputs.flatten(0, 1)))
        rows, columns = patches.shape[1:3]
        patches = patches.reshape(clients, count, rows * columns, -1)
        weight = params[self.weight].flatten(2)
        outputs = torch.baddbmm(params[self.weight + 1].unsqueeze(1), patches.flatten(1, 2), weight.transpose(1, 2))
        return outputs.view(clients, count, rows, columns, -1), (patches, image)

    def backward(
        self, params: list[Tensor], saved: Any, grads: Tensor, *, further: bool
    ) -> tuple[Tensor | None, Use | None]:
        """See `simulation.layers.Layer`."""
        patches, image = saved
        use = Use(self.weight, patches, grads.flatten(2, 3))
        if not further:
            return None, use
        weight = params[self.weight].flatten(2)
        back = torch.bmm(grads.flatten(1, 3), weight).view(*grads.shape[:4], *self.kernel, image[2])
        return self._folded(back, image), use

    def _padded(self, images: Tensor) -> Tensor:
        if self.padding == (0, 0):
            return images.contiguous()
        (top, left), (count, height, width, channels) = self.padding, images.shape
        padded = images.new_zeros(count, height + 2 * top, width + 2 * left, channels)
        padded[:, top : top + height, left : left + width] = images
        return padded

    def _patches(self, images: Tensor) -> Tensor:
        """A view (count, rows, columns, kernel height, kernel width * channels) of what each output reads."""
        count, height, width, channels = images.shape
        rows, columns = (
            (length - kernel) // stride + 1
            for length, kernel, stride in zip((height, width), self.kernel, self.stride, strict=True)
        )
        line = width * channels
        return images.as_strided(
            (count, rows, columns, self.kernel[0], self.kernel[1] * channels),
            (height * line, self.stride[0] * line, self.stride[1] * channels, line, 1),
        )

    def _folded(self, back: Tensor, image: list[int]) -> Tensor:
        """The gradients at the image: every patch's added where it was read. back: (k, n, rows, columns, *kernel, channels)."""
        clients, count, rows, columns = back.shape[:4]
        (top, left), (height, width, channels) = self.padding, image
        down, across = self.stride
        grads = back.new_zeros(clients, count, height + 2 * top, width + 2 * left, channels)
        for row in range(self.kernel[0]):
            for column in range(self.kernel[1]):
                read = grads[:, :, row : row + down * rows : down, column : column + across * columns : across]
                read += back[:, :, :, :, row, column]
        return grads[:, :, top : top + height, left : left + width]


@dataclass(frozen=True)
class MaxPool:
    """The largest value of each window; its gradient goes to the first place that has it."""

    kernel: Pair
    stride: Pair

    def forward(self, params: list[Tensor], inputs: Tensor) -> tuple[Tensor, Any]:
        """See `simulation.layers.Layer`."""
        images = inputs.flatten(0, 1).permute(0, 3, 1, 2)
        outputs, places = _pool(images, self.kernel, self.stride)
        return outputs.permute(0, 2, 3, 1).unflatten(0, inputs.shape[:2]), (images, places)

    def backward(
        self, params: list[Tensor], saved: Any, grads: Tensor, *, further: bool
    ) -> tuple[Tensor | None, Use | None]:
        """See `simulation.layers.Layer`."""
        images, places = saved
        outer = grads.flatten(0, 1).permute(0, 3, 1, 2)
        back = _pool_backward(outer, images, self.kernel, self.stride, (0, 0), (1, 1), False, places)
        return back.permute(0, 2, 3, 1).unflatten(0, grads.shape[:2]), None
