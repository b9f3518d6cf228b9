"""Parameters of many clients: rows (k, num_params) as they travel, and a tensor a parameter as layers read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """One parameter's place in a row.

    Attributes:
        offset: where it starts.
        shape: its shape in the model, where a dimension may be split in several.
        order: the order of these dimensions in the stack.
    """

    offset: int
    shape: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    def view(self, rows: Tensor) -> Tensor:
        """This parameter of each row, in the stack's order of dimensions; writing to it writes to the rows."""
        block = rows[:, self.offset : self.offset + self.size].view(len(rows), *self.shape)
        return block.permute(0, *(1 + dim for dim in self.order))


@dataclass(frozen=True)
class ParameterLayout:
    """Where every parameter stands, in the order of model.parameters()."""

    blocks: tuple[Block, ...]
    size: int

    def stack(self, params: Tensor, count: int) -> list[Tensor]:
        """`count` copies of one model `params` (num_params,): contiguous, so that products write into them."""
        views = self.views(params.unsqueeze(0))
        # Cloned: contiguous() of a single copy would be `params` itself, and training would move the server's model.
        return [view.expand(count, *view.shape[1:]).clone(memory_format=torch.contiguous_format) for view in views]

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


def layout_of(shapes: Sequence[tuple[int, ...]], orders: Sequence[tuple[int, ...]] | None = None) -> ParameterLayout:
    """Parameters of these shapes, one after the other; without `orders` dimensions stay as they are."""
    blocks, offset = [], 0
    for number, shape in enumerate(shapes):
        order = orders[number] if orders else tuple(range(len(shape)))
        blocks.append(Block(offset, shape, order))
        offset += blocks[-1].size
    return ParameterLayout(tuple(blocks), offset)
