"""Convolutions and pooling of many models at once, on images with channels last: (k, n, height, width, channels).

A convolution is one matrix product a client: the patches that it reads are laid out as rows ("im2col"), and the
gradient of its weight is one product too. Where the stride divides the kernel, as in most networks, every block of
stride x stride pixels is first turned into channels: what is left has stride 1 and a kernel so many times smaller, and
its patches are copied in so many times longer pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from simulation.layers import Use

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
        weight: the number of the weight, which is (k, out, height / block, width / block, block, block, channels).
        kernel, stride, padding: as the model has them.
        block: the side of the blocks of pixels that become channels; it divides kernel and stride. 1: none do.
    """

    weight: int
    kernel: Pair
    stride: Pair
    padding: Pair
    block: int

    def forward(self, params: list[Tensor], inputs: Tensor) -> tuple[Tensor, Any]:
        clients, count, *image = inputs.shape
        rows, columns = self.output_size((image[0], image[1]))
        blocks = self._blocks(inputs.flatten(0, 1), rows, columns)
        patches = self._patches(blocks, rows, columns).reshape(clients, count, rows * columns, -1)
        weight = params[self.weight].flatten(2)
        outputs = torch.baddbmm(params[self.weight + 1].unsqueeze(1), patches.flatten(1, 2), weight.transpose(1, 2))
        return outputs.view(clients, count, rows, columns, -1), (patches, image)

    def backward(
        self, params: list[Tensor], saved: Any, grads: Tensor, *, further: bool
    ) -> tuple[Tensor | None, list[Use]]:
        patches, image = saved
        use = Use(self.weight, self.weight + 1, patches, grads.flatten(2, 3))
        if not further:
            return None, [use]
        back = torch.bmm(grads.flatten(1, 3), params[self.weight].flatten(2))
        return self._folded(back.view(*grads.shape[:4], *params[self.weight].shape[2:4], -1), image), [use]

    def output_size(self, image: Pair) -> Pair:
        """Height and width of the output for an image of this height and width."""
        height, width = (
            (length + 2 * pad - kernel) // stride + 1
            for length, pad, kernel, stride in zip(image, self.padding, self.kernel, self.stride, strict=True)
        )
        return height, width

    def _read_size(self, rows: int, columns: int) -> Pair:
        """Height and width of what the output reads of the padded image: a multiple of the block."""
        return (rows - 1) * self.stride[0] + self.kernel[0], (columns - 1) * self.stride[1] + self.kernel[1]

    def _blocks(self, images: Tensor, rows: int, columns: int) -> Tensor:
        """(count, height, width, channels) to (count, height / block, width / block, block * block * channels)."""
        (height, width), (top, left) = self._read_size(rows, columns), self.padding
        if self.padding != (0, 0) or images.shape[1:3] != (height, width):
            padded = images.new_zeros(len(images), height, width, images.shape[3])
            inside = images[:, : height - top, : width - left]
            padded[:, top : top + inside.shape[1], left : left + inside.shape[2]] = inside
            images = padded
        count, channels, side = len(images), images.shape[3], self.block
        split = images.reshape(count, height // side, side, width // side, side, channels)
        return split.transpose(2, 3).reshape(count, height // side, width // side, -1).contiguous()

    def _patches(self, blocks: Tensor, rows: int, columns: int) -> Tensor:
        """What each output reads, in blocks: a view (count, rows, columns, kernel height, kernel width * channels)."""
        count, height, width, channels = blocks.shape
        line, (down, across) = width * channels, (length // self.block for length in self.stride)
        return blocks.as_strided(
            (count, rows, columns, self.kernel[0] // self.block, self.kernel[1] // self.block * channels),
            (height * line, down * line, across * channels, line, 1),
        )

    def _folded(self, back: Tensor, image: list[int]) -> Tensor:
        """The gradients at the image: each patch's added where it was read.

        back: (k, n, rows, columns, kernel height, kernel width, channels), in blocks.
        """
        (rows, columns, tall, wide), channels = back.shape[2:6], back.shape[6]
        height, width = self._read_size(rows, columns)
        grads = back.new_zeros(*back.shape[:2], height // self.block, width // self.block, channels)
        down, across = (length // self.block for length in self.stride)
        for row in range(tall):
            for column in range(wide):
                read = grads[:, :, row : row + down * rows : down, column : column + across * columns : across]
                read += back[:, :, :, :, row, column]
        split = grads.view(*grads.shape[:4], self.block, self.block, image[2]).transpose(3, 4)
        return self._cut(split.reshape(*back.shape[:2], height, width, image[2]), image)

    def _cut(self, grads: Tensor, image: list[int]) -> Tensor:
        """Without the padding; where the image goes on beyond what was read, with zeros."""
        (top, left), (height, width, channels) = self.padding, image
        inside = grads[:, :, top : top + height, left : left + width]
        if inside.shape[2:4] == (height, width):
            return inside
        whole = grads.new_zeros(*grads.shape[:2], height, width, channels)
        whole[:, :, : inside.shape[2], : inside.shape[3]] = inside
        return whole


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
