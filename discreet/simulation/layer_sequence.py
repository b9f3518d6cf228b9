"""Many models of one architecture, trained at once: gradients, and clipped sums of per-example gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from discreet.privacy.clipping import clip_factors
from discreet.privacy.rules.objective import Loss, cross_entropy, softmax_minus_one_hot
from discreet.privacy.rules.terms import mass
from discreet.simulation.batches import Batch
from discreet.simulation.layers import Layer, Use

LARGEST_NORM = 2.0**44  # as in discreet.privacy.per_example, a gradient beyond it counts as zero


@dataclass(frozen=True)
class Block:
    """One parameter's place in a row.

    Attributes:
        offset: where it starts.
        shape: its shape in the model, or that with a dimension split in several.
        order: the order of these dimensions as the layers read them.
    """

    offset: int
    shape: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    def view(self, rows: Tensor) -> Tensor:
        """This parameter of each row, in the layers' order of dimensions; writing to it writes to the rows."""
        block = rows[:, self.offset : self.offset + self.size].view(len(rows), *self.shape)
        return block.permute(0, *(1 + dim for dim in self.order))


@dataclass(frozen=True)
class ParameterLayout:
    """Where every parameter stands, in the order of model.parameters()."""

    blocks: tuple[Block, ...]
    size: int

    def copies(self, params: Tensor, count: int) -> list[Tensor]:
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


@dataclass(frozen=True, eq=False)
class LayerSequence:
    """The models of k clients, layer after layer; parameters are a list of tensors (k, ...), as `layout` has them."""

    layers: tuple[Layer, ...]
    layout: ParameterLayout
    first: int  # the first layer with parameters: no gradient is needed before it
    loss: Loss = cross_entropy

    def accumulate(self, params: list[Tensor], batch: Batch, into: list[Tensor], *, keep: float, rate: float) -> None:
        """into = keep * into + rate * (the weighted sum of the batch's gradients at `params`), in place.

        `into` may be `params` itself: gradients are those before any of it has changed.
        """
        self.apply(self.passes(params, batch)[1], into, keep=keep, rate=rate)

    def apply(self, uses: list[Use], into: list[Tensor], *, keep: float, rate: float) -> None:
        """into = keep * into + rate * (the gradients that `uses` are made of), in place."""
        for use in uses:
            inputs, grads = use.inputs.flatten(1, 2), use.grads.flatten(1, 2)
            weight = into[use.weight]
            weight.view(*weight.shape[:2], -1).baddbmm_(grads.transpose(1, 2), inputs, beta=keep, alpha=rate)
            if use.bias is not None:
                add_bias(into[use.bias], grads, keep=keep, rate=rate)

    def clipped_sums(self, params: list[Tensor], batch: Batch, l2_norm_clip: float) -> Tensor:
        """Each client's sum of per-example gradients, every one clipped to `l2_norm_clip`: (k, num_params)."""
        _, uses = self.passes(params, batch)
        scale = clip_scale(torch.stack([_squared_norms(use) for use in uses]).sum(0).sqrt(), l2_norm_clip)
        totals = [torch.zeros(0)] * len(self.layout.blocks)
        for use in uses:
            inputs, grads = _finite(use, scale)
            grads = (grads.double() * scale[:, :, None, None]).to(grads.dtype).flatten(1, 2)
            weight = params[use.weight]
            totals[use.weight] = torch.bmm(grads.transpose(1, 2), inputs.flatten(1, 2)).view(weight.shape)
            if use.bias is not None:
                totals[use.bias] = grads.sum(1)
        return self.layout.rows(totals)

    def passes(self, params: list[Tensor], batch: Batch, *, first: int = 0) -> tuple[Tensor | None, list[Use]]:
        """The forward and the backward pass of the layers from `first` on, which reads the batch's inputs.

        Returns the gradients at these inputs (None if nothing before them has parameters), and what the layers'
        own gradients are made of.
        """
        outputs, saved = batch.inputs, []
        for layer in self.layers[first:]:
            outputs, kept = layer.forward(params, outputs)
            saved.append(kept)
        grads: Tensor | None = output_gradients(outputs, batch, self.loss)
        uses: list[Use] = []
        for number in reversed(range(max(first, self.first), len(self.layers))):
            assert grads is not None
            further = number > self.first
            grads, found = self.layers[number].backward(params, saved[number - first], grads, further=further)
            uses += found
        return grads, uses


def add_bias(bias: Tensor, grads: Tensor, *, keep: float, rate: float) -> None:
    """bias = keep * bias + rate * (the sum of `grads` (k, n, out) over n), in place."""
    if keep != 1:
        bias.mul_(keep)
    bias.add_(grads.sum(1), alpha=rate)


def output_gradients(outputs: Tensor, batch: Batch, loss: Loss) -> Tensor:
    """The gradients of weight times loss at outputs (k, n, ...). Of the cross entropy of single classes they are
    weight * (softmax - one-hot); of any other loss, and of sequences, PyTorch computes them."""
    if loss is cross_entropy and outputs.dim() == 3:
        return softmax_minus_one_hot(outputs, batch.targets).mul_(batch.weights.unsqueeze(2))
    with torch.enable_grad():
        given = outputs.detach().flatten(0, 1).requires_grad_()
        losses = loss(given, batch.targets.flatten(0, 1))
    return torch.autograd.grad(losses, given, batch.weights.flatten())[0].view_as(outputs)


def _squared_norms(use: Use) -> Tensor:
    """Squared norms of a layer's per-example gradients, weight and bias, (k, n), float64.

    With one position an example they are products of norms (Goodfellow 2015), in float64 throughout: a large norm may
    hide behind the square of a small one. Otherwise the gradients are built.
    """
    grads, inputs = use.grads, use.inputs
    if inputs.shape[2] == 1:
        added = 0 if use.bias is None else 1
        return _squares(grads[:, :, 0]) * (_squares(inputs[:, :, 0]) + added)
    built = torch.matmul(grads.transpose(2, 3), inputs)
    squares = mass(built.flatten(0, 1), 2).double().view(built.shape[:2])
    return squares if use.bias is None else squares + _squares(grads.sum(2))


def _squares(values: Tensor) -> Tensor:
    """Squared norms over the last dimension, float64."""
    squares: Tensor = torch.linalg.vector_norm(values, dim=-1, dtype=torch.float64).square()
    return squares


def clip_scale(norms: Tensor, l2_norm_clip: float) -> Tensor:
    """What brings gradients of these norms to at most `l2_norm_clip`, at most 1; 0 for norms that are not usable."""
    return torch.where(norms < LARGEST_NORM, clip_factors(norms, l2_norm_clip), 0.0)


def _finite(use: Use, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and gradients, zero if an example does not count: 0 * inf would poison the products."""
    lost = scale == 0
    if not bool(lost.any()):
        return use.inputs, use.grads
    return tuple(values.masked_fill(lost[:, :, None, None], 0.0) for values in (use.inputs, use.grads))  # type: ignore[return-value]
