"""The parameters of many models: as rows, as they travel, or as one tensor (k, ...) for each, as layers read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

Shape = tuple[int, ...]
Params = list[Tensor]  # of a whole model, each (k, ...)


@dataclass(frozen=True)
class Block:
    """One parameter's place in a row, as `layout_of` sets it.

    Attributes:
        offset: where it starts.
        shape: its shape in the model, or that with a dimension split in several.
        order: the order of these dimensions as the layers read them.
    """

    offset: int
    shape: Shape
    order: Shape

    def view(self, rows: Tensor) -> Tensor:
        """This parameter of each row, in the layers' order of dimensions; writing to it writes to the rows."""
        block = rows[:, self.offset : self.offset + math.prod(self.shape)].view(len(rows), *self.shape)
        return block.permute(0, *(1 + dim for dim in self.order))


@dataclass(frozen=True)
class ParameterLayout:
    """Every parameter's place, in the order of model.parameters()."""

    blocks: tuple[Block, ...]
    size: int

    def copies(self, params: Tensor, count: int) -> Params:
        """`count` copies of one model `params` (num_params,): contiguous, so that products write into them."""
        views = self.views(params.unsqueeze(0))
        # Cloned: contiguous() of a single copy would be `params` itself, and training would move the server's model.
        return [view.expand(count, *view.shape[1:]).clone(memory_format=torch.contiguous_format) for view in views]

    def views(self, rows: Tensor) -> Params:
        """Each parameter of rows (k, num_params)."""
        return [block.view(rows) for block in self.blocks]

    def rows(self, tensors: Params) -> Tensor:
        """The inverse of `views`: (k, num_params)."""
        rows = tensors[0].new_empty(len(tensors[0]), self.size)
        for view, tensor in zip(self.views(rows), tensors, strict=True):
            view.copy_(tensor)
        return rows

    def change(self, tensors: Params, params: Tensor) -> Tensor:
        """The distance of each client's parameters from `params` (num_params,): (k, num_params)."""
        rows = params.new_empty(len(tensors[0]), self.size)
        for view, tensor, start in zip(self.views(rows), tensors, self.views(params.unsqueeze(0)), strict=True):
            torch.sub(tensor, start, out=view)
        return rows


def layout_of(parameters: Sequence[tuple[Shape, Shape]]) -> ParameterLayout:
    """The layout of parameters of these shapes, each with its order of dimensions, one after the other."""
    offsets = [0, *accumulate(math.prod(shape) for shape, _ in parameters)]
    return ParameterLayout(
        tuple(Block(start, *one) for start, one in zip(offsets, parameters, strict=False)), offsets[-1]
    )
