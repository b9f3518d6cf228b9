"""Many models of one architecture: their layers, gradients, and clipped sums of per-example gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from discreet.per_example.convolution import Geometry
from discreet.per_example.objective import Loss, cross_entropy, softmax_minus_one_hot
from discreet.per_example.terms import mass, unchanged
from discreet.privacy.clipping import clip_factors
from discreet.simulation.batched_layers import (
    CHANNELS_LAST,
    RELU,
    TANH,
    Backward,
    Dense,
    Flatten,
    Layer,
    MaxPool,
    Pair,
    Params,
    Patches,
    Use,
)
from discreet.simulation.client_examples import Batch

Shape = tuple[int, ...]

LARGEST_NORM = 2.0**44  # as in discreet.per_example.per_example, a gradient beyond it counts as zero


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


@dataclass(frozen=True, eq=False)
class LayerSequence:
    """The models of k clients, layer after layer; parameters are a list of tensors (k, ...), as `layout` has them."""

    layers: tuple[Layer, ...]
    layout: ParameterLayout
    first: int  # the first layer with parameters: no gradient is needed before it
    loss: Loss = cross_entropy

    def accumulate(self, params: Params, batch: Batch, into: Params, *, keep: float, rate: float) -> None:
        """into = keep * into + rate * (the weighted sum of the batch's gradients at `params`), in place.

        `into` may be `params` itself: gradients are those before any of it has changed.
        """
        self.apply(self.passes(params, batch)[1], into, keep=keep, rate=rate)

    def apply(self, uses: list[Use], into: Params, *, keep: float, rate: float) -> None:
        """into = keep * into + rate * (the gradients that `uses` are made of), in place."""
        for use in uses:
            inputs, grads = use.inputs.flatten(1, 2), use.grads.flatten(1, 2)
            weight = into[use.weight]
            weight.view(*weight.shape[:2], -1).baddbmm_(grads.transpose(1, 2), inputs, beta=keep, alpha=rate)
            add_bias(into[use.weight + 1], grads, keep=keep, rate=rate)

    def clipped_sums(self, params: Params, batch: Batch, clip_norm: float) -> Tensor:
        """Each client's sum of per-example gradients, every one clipped to `clip_norm`: (k, num_params)."""
        _, uses = self.passes(params, batch)
        scale = clip_scale(torch.stack([_squared_norms(use) for use in uses]).sum(0).sqrt(), clip_norm)
        totals = [torch.zeros(0)] * len(self.layout.blocks)
        for use in uses:
            inputs, grads = _finite(use, scale)
            grads = (grads.double() * scale[:, :, None, None]).to(grads.dtype).flatten(1, 2)
            weight = params[use.weight]
            totals[use.weight] = torch.bmm(grads.transpose(1, 2), inputs.flatten(1, 2)).view(weight.shape)
            totals[use.weight + 1] = grads.sum(1)
        return self.layout.rows(totals)

    def passes(self, params: Params, batch: Batch, *, first: int = 0) -> Backward:
        """Runs the layers from `first` on forward, on the batch's inputs, and backward.

        Returns the gradients at these inputs (None if nothing before them has parameters), and the parts of the
        layers' own.
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
        return _squares(grads[:, :, 0]) * (_squares(inputs[:, :, 0]) + 1)
    built = torch.matmul(grads.transpose(2, 3), inputs)
    return mass(built.flatten(0, 1), 2).double().view(built.shape[:2]) + _squares(grads.sum(2))


def _squares(values: Tensor) -> Tensor:
    """Squared norms over the last dimension, float64."""
    squares: Tensor = torch.linalg.vector_norm(values, dim=-1, dtype=torch.float64).square()
    return squares


def clip_scale(norms: Tensor, clip_norm: float) -> Tensor:
    """Factors in [0, 1] that bring gradients of these norms to at most `clip_norm`; 0 for unusable norms."""
    return torch.where(norms < LARGEST_NORM, clip_factors(norms, clip_norm), 0.0)


def _finite(use: Use, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and gradients, zero if an example does not count: 0 * inf would poison the products."""
    lost = (scale == 0)[:, :, None, None]
    if not bool(lost.any()):
        return use.inputs, use.grads
    return use.inputs.masked_fill(lost, 0.0), use.grads.masked_fill(lost, 0.0)


class _Uncovered(Exception):
    """A layer has no pass by hand."""


def sequence_of(model: nn.Module, input_shape: Shape, *, loss: Loss = cross_entropy) -> LayerSequence | None:
    """The layers of a model for inputs of `input_shape`; None if one of them, or how it is set, is not covered.

    Nor are frozen parameters, hooks, and parameters that several layers share: clients of such a model are trained one
    after the other.
    """
    values = [value for _, value in model.named_parameters(remove_duplicate=False)]
    if (
        type(model) is not nn.Sequential
        or len({id(value) for value in values}) < len(values)
        or not all(value.requires_grad for value in values)
        or not all(map(unchanged, model.modules()))
    ):
        return None
    builder = _Builder(input_shape)
    try:
        builder.sequence(model)
    except _Uncovered:
        return None
    if builder.first is None:
        return None
    return LayerSequence(tuple(builder.layers), layout_of(builder.parameters), builder.first, loss)


class _Builder:
    """Follows one example through a model: its shape as the layers read it, and the kind of thing that it is.

    The kinds are "inputs" (as the data set has them), "image" (its channels are last), "flat image" (the next linear
    layer reads it by a weight in the image's order), and "vector".
    """

    def __init__(self, input_shape: Shape) -> None:
        self.layers: list[Layer] = []
        self.parameters: list[tuple[Shape, Shape]] = []  # shapes, and orders of their dimensions
        self.first: int | None = None  # layer with parameters
        self.shape = input_shape
        self.kind = "vector" if len(input_shape) == 1 else "inputs"

    def add(self, layer: Layer, *shapes: Shape, order: Shape = (0, 1)) -> None:
        """A layer, and its parameters: `order` is that of a weight's dimensions."""
        if shapes and self.first is None:
            self.first = len(self.layers)
        self.layers.append(layer)
        self.parameters += [(shape, order if len(shape) > 1 else (0,)) for shape in shapes]

    def sequence(self, module: nn.Sequential) -> None:
        for part in module:
            _require(type(part) in _ADD)
            _ADD[type(part)](self, part)

    def flatten(self, module: nn.Flatten) -> None:
        _require((module.start_dim, module.end_dim) == (1, -1))
        if self.kind in ("inputs", "image"):
            self.add(Flatten())
            self.kind = "flat image" if self.kind == "image" else "vector"
            self.shape = self.shape if self.kind == "flat image" else (math.prod(self.shape),)

    def linear(self, module: nn.Linear) -> None:
        _require(module.bias is not None and self.kind in ("vector", "flat image"))
        out, order = module.out_features, (0, 2, 3, 1) if self.kind == "flat image" else (0, 1)
        self.add(Dense(len(self.parameters)), (out, *self.shape), (out,), order=order)
        self.kind, self.shape = "vector", (out,)

    def convolution(self, module: nn.Conv2d) -> None:
        _require(module.groups == 1 and module.dilation == (1, 1) and module.padding_mode == "zeros")
        _require(module.bias is not None and len(self.shape) == 3 and self.kind in ("inputs", "image"))
        if self.kind == "inputs":
            self.add(CHANNELS_LAST)
        kernel, stride, (tall, wide) = (_pair(value) for value in (module.kernel_size, module.stride, module.padding))
        patches = Patches(Geometry(kernel, stride, (1, 1), ((tall, tall), (wide, wide)), groups=1))
        channels, out = self.shape[0], module.out_channels
        self.add(patches)
        self.add(Dense(len(self.parameters)), (out, channels, *kernel), (out,), order=(0, 2, 3, 1))
        self.kind, self.shape = "image", (out, *patches.positions(self.shape[1:]))

    def pool(self, module: nn.MaxPool2d) -> None:
        plain = _pair(module.padding) == (0, 0) and _pair(module.dilation) == (1, 1)
        _require(plain and _pair(module.kernel_size) == (2, 2) and not (module.ceil_mode or module.return_indices))
        _require(self.kind == "image")
        channels, height, width = self.shape
        down, across = _pair(module.stride)
        self.add(MaxPool((down, across)))
        self.shape = (channels, (height - 2) // down + 1, (width - 2) // across + 1)


def _require(covered: bool) -> None:
    if not covered:
        raise _Uncovered


_ADD: dict[type[nn.Module], Callable[[_Builder, Any], None]] = {
    nn.Sequential: _Builder.sequence,
    nn.Flatten: _Builder.flatten,
    nn.Linear: _Builder.linear,
    nn.Conv2d: _Builder.convolution,
    nn.MaxPool2d: _Builder.pool,
    nn.ReLU: lambda builder, _: builder.add(RELU),
    nn.Tanh: lambda builder, _: builder.add(TANH),
}


def _pair(value: int | str | tuple[int, ...]) -> Pair:
    if isinstance(value, str):
        raise _Uncovered
    return (value, value) if isinstance(value, int) else (value[0], value[1])
