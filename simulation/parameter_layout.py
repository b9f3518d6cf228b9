"""Parameters of many clients: rows (k, num_params) as they travel, and a tensor a parameter as layers read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """One parameter's place in a row.

    Attributes:
        offset: where it starts.
        shape: its shape in the model.
        channels_last: the second dimension goes last in the stack, as layers on images with channels last want it.
    """

    offset: int
    shape: tuple[int, ...]
    channels_last: bool = False

    def view(self, rows: Tensor) -> Tensor:
        """This parameter of each row, in the stack's order of dimensions; writing to it writes to the rows."""
        size = 1
        for length in self.shape:
            size *= length
        block = rows[:, self.offset : self.offset + size].view(len(rows), *self.shape)
        return block.movedim(2, -1) if self.channels_last else block


@dataclass(frozen=True)
class ParameterLayout:
    """Where every parameter stands, in the order of model.parameters()."""

    blocks: tuple[Block, ...]
    size: int

    def stack(self, params: Tensor, count: int) -> list[Tensor]:
        """`count` copies of one model `params` (num_params,): contiguous, so that products write into them."""
        views = self.views(params.unsqueeze(0))
        return [view.expand(count, *view.shape[1:]).contiguous() for view in views]

    def views(self, rows: Tensor) -> list[Tensor]:
        """Each parameter of rows (k, num_params)."""
        return [block.view(rows) for block in self.blocks]

    def rows(self, tensors: Sequence[Tensor]) -> Tensor:
        """The inverse of `views`: (k, num_params)."""
        rows = tensors[0].new_empty(len(tensors[0]), self.size)
        for view, tensor in zip(self.views(rows), tensors, strict=True):
            view.copy_(tensor)
        return rows

    def change(self, tensors: Sequence[Tensor], params: Tensor) -> Tensor:
        """How far each client has moved from `params` (num_params,): (k, num_params)."""
        rows = params.new_empty(len(tensors[0]), self.size)
        for view, tensor, start in zip(self.views(rows), tensors, self.views(params.unsqueeze(0)), strict=True):
            torch.sub(tensor, start, out=view)
        return rows


def layout_of(shapes: Sequence[tuple[int, ...]], channels_last: Sequence[bool]) -> ParameterLayout:
    """Parameters of these shapes, one after the other."""
    blocks, offset = [], 0
    for shape, last in zip(shapes, channels_last, strict=True):
        blocks.append(Block(offset, shape, last))
        offset += torch.Size(shape).numel()
    return ParameterLayout(tuple(blocks), offset)
