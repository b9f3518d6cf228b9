"""Many models of one architecture, layer after layer: row c of every tensor belongs to client c.

Each layer has hand-written forward and backward passes: with a model of a few small matrices for
each client, the overhead of autograd would exceed the cost of the products.

Shapes: k clients, n examples each. Images have their channels last, (k, n, height, width,
channels). A convolution is a linear layer on the patches that it reads, laid out as rows
("im2col").
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from discreet.layers.convolution import Geometry
from discreet.layers.terms import mass
from discreet.per_example.objective import Loss, cross_entropy, softmax_minus_one_hot
from discreet.per_example.perceptron import unchanged
from discreet.privacy.clipping import clip_factors
from discreet.privacy.private import Private

_pool_backward = torch.ops.aten.max_pool2d_with_indices_backward.default

Pair = tuple[int, int]
Shape = tuple[int, ...]
Params = list[Tensor]  # of many models: each parameter (k, ...)

# A gradient with a larger norm counts as zero, as in discreet.per_example.per_example.
LARGEST_NORM = 2.0**44


@dataclass(frozen=True, eq=False, repr=False)
class Batch(Private):
    """A batch of k clients, read from the data set: tensors (k, width, ...). `weights` (k, width)
    are the weights of gradients, 0 for padding."""

    inputs: Tensor
    targets: Tensor
    weights: Tensor


@dataclass(frozen=True)
class ParameterLayout:
    """The place of each parameter in a row of parameters, in the order of model.parameters(): its
    shape in the model, perhaps with a dimension split in several, and the order in which the layers
    read these dimensions."""

    parameters: tuple[tuple[Shape, Shape], ...]

    @cached_property
    def sizes(self) -> list[int]:
        return [math.prod(shape) for shape, _ in self.parameters]

    @cached_property
    def size(self) -> int:
        """The number of floats of a model."""
        return sum(self.sizes)

    @cached_property
    def _in_rows(self) -> list[tuple[Shape, Shape]]:
        """The shape and the order of each parameter in rows of many models."""
        return [
            ((-1, *shape), (0, *(1 + dim for dim in order))) for shape, order in self.parameters
        ]

    def copies(self, params: Tensor, count: int) -> Params:
        """`count` copies of one model `params` (num_params,), contiguous, so that products can
        write to them."""
        views = self.views(params.unsqueeze(0))
        # Cloned, as contiguous() of a single copy would be `params` itself, and training would
        # change the server's model.
        return [
            view.expand(count, *view.shape[1:]).clone(memory_format=torch.contiguous_format)
            for view in views
        ]

    def views(self, rows: Tensor) -> Params:
        """Views of each parameter in rows (k, num_params), in the layout of the layers."""
        pairs = zip(torch.split(rows, self.sizes, dim=1), self._in_rows, strict=True)
        return [part.view(shape).permute(order) for part, (shape, order) in pairs]

    def rows(self, tensors: Params) -> Tensor:
        """The inverse of `views`: (k, num_params)."""
        rows = tensors[0].new_empty(len(tensors[0]), self.size)
        for view, tensor in zip(self.views(rows), tensors, strict=True):
            view.copy_(tensor)
        return rows

    def change(self, tensors: Params, params: Tensor) -> Tensor:
        """The difference of each client's parameters from `params` (num_params,): (k,
        num_params)."""
        rows = params.new_empty(len(tensors[0]), self.size)
        for view, tensor, start in zip(
            self.views(rows), tensors, self.views(params.unsqueeze(0)), strict=True
        ):
            torch.sub(tensor, start, out=view)
        return rows


@dataclass(frozen=True, slots=True, repr=False)
class Use(Private):
    """A layer's inputs (k, n, positions, width) and the gradients at its outputs (k, n, positions,
    out). The gradient of example i of client c is grads[c, i]^T inputs[c, i] for parameter number
    `weight`, and the sum of grads[c, i] over positions for the next one, the bias."""

    weight: int
    inputs: Tensor
    grads: Tensor


# A layer's forward returns its outputs, and the values saved for backward. Backward returns the
# gradients of the inputs, if `further` needs them, and the uses for the layer's own gradients.
Backward = tuple[Tensor | None, list[Use]]


@dataclass(frozen=True)
class Dense:
    """A linear layer on the last dimension of (k, n, ..., width), also on patches of a convolution.
    Weights are (k, out, ...), with `width` numbers for each output; biases are (k, out)."""

    weight: int

    def forward(self, params: Params, inputs: Tensor) -> tuple[Tensor, Any]:
        rows = inputs.flatten(1, -2)
        weight = params[self.weight].flatten(2)
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
    """An elementwise function, in place, and its derivative as a function of the outputs."""

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
class Patches:
    """The patches that a two-dimensional convolution with zero padding reads, for a `Dense` layer:
    (k, n, height, width, channels) to (k, n, rows, columns, kernel height * kernel width *
    channels). At the `start` of a model they read (k, n, channels, height, width), the layout of
    data sets, and pass on no gradient."""

    geometry: Geometry
    start: bool

    def forward(self, params: Params, inputs: Tensor) -> tuple[Tensor, Any]:
        if self.start:
            images = inputs.flatten(0, 1)
        else:
            images = inputs.flatten(0, 1).movedim(-1, 1)
        patches = self.geometry.patches(images)
        return patches.view(
            *inputs.shape[:2], *self.positions(images.shape[2:]), patches.shape[-1]
        ), images.shape[2:]

    def backward(self, params: Params, saved: Any, grads: Tensor, *, further: bool) -> Backward:
        """The gradients of the image: each patch's gradients are added at its position."""
        tall, wide = self.geometry.kernel
        rows, columns = grads.shape[2:4]
        height, width = saved
        (top, bottom), (left, right) = self.geometry.padding
        down, across = self.geometry.stride
        by_place = grads.view(*grads.shape[:4], tall, wide, -1)
        image = grads.new_zeros(
            *grads.shape[:2], height + top + bottom, width + left + right, by_place.shape[-1]
        )
        for row in range(tall):
            for column in range(wide):
                read = image[
                    :,
                    :,
                    row : row + down * rows : down,
                    column : column + across * columns : across,
                ]
                read += by_place[:, :, :, :, row, column]
        return image[:, :, top : top + height, left : left + width], []

    def positions(self, image: tuple[int, ...]) -> list[int]:
        """The rows and columns of patches in an image of this height and width."""
        return self.geometry.ends(image)


@dataclass(frozen=True)
class MaxPool:
    """The largest value of each 2 x 2 window, by PyTorch, which supports channels-last images."""

    stride: Pair

    def forward(self, params: Params, inputs: Tensor) -> tuple[Tensor, Any]:
        images = inputs.flatten(0, 1).permute(0, 3, 1, 2)
        outputs, places = functional.max_pool2d(images, 2, self.stride, return_indices=True)
        return outputs.permute(0, 2, 3, 1).view(*inputs.shape[:2], *outputs.shape[2:], -1), (
            images,
            places,
        )

    def backward(self, params: Params, saved: Any, grads: Tensor, *, further: bool) -> Backward:
        images, places = saved
        given = grads.flatten(0, 1).permute(0, 3, 1, 2)
        back = _pool_backward(
            given, images, [2, 2], list(self.stride), [0, 0], [1, 1], False, places
        )
        return back.permute(0, 2, 3, 1).view(*grads.shape[:2], *images.shape[2:], -1), []


Layer = Dense | Activation | Flatten | Patches | MaxPool


@dataclass(frozen=True, eq=False)
class LayerSequence:
    """The models of k clients, layer after layer; parameters are a list of tensors (k, ...) as in
    `layout`."""

    layers: tuple[Layer, ...]
    layout: ParameterLayout
    first: int  # the first layer with parameters; no gradients are needed before it
    loss: Loss = cross_entropy

    @cached_property
    def begins_linear(self) -> bool:
        """True if the first layer with parameters is linear and reads the inputs themselves."""
        before = self.layers[: self.first]
        linear = isinstance(self.layers[self.first], Dense)
        return linear and all(isinstance(layer, Flatten) for layer in before)

    def accumulate(
        self, params: Params, batch: Batch, into: Params, *, keep: float, rate: float
    ) -> None:
        """into = keep * into + rate * (the weighted sum of the batch's gradients at `params`), in
        place. `into` may be `params` itself: all gradients are computed before it changes."""
        _, uses = self.passes(params, batch)
        self.apply(uses, into, keep=keep, rate=rate)

    def apply(self, uses: list[Use], into: Params, *, keep: float, rate: float) -> None:
        """into = keep * into + rate * (the sum of the gradients of `uses`), in place."""
        for use in uses:
            inputs = use.inputs.flatten(1, 2)
            grads = use.grads.flatten(1, 2)
            weight = into[use.weight]
            bias = into[use.weight + 1]
            weight.view(*weight.shape[:2], -1).baddbmm_(
                grads.transpose(1, 2), inputs, beta=keep, alpha=rate
            )
            if keep != 1:
                bias.mul_(keep)
            bias.add_(grads.sum(1), alpha=rate)

    def clipped_sums(self, params: Params, batch: Batch, clip_norm: float) -> Tensor:
        """Each client's sum of per-example gradients, every one clipped to `clip_norm`: (k,
        num_params)."""
        _, uses = self.passes(params, batch)
        scale = clip_scale(
            torch.stack([_squared_norms(use) for use in uses]).sum(0).sqrt(), clip_norm
        )
        totals = [torch.zeros(0)] * len(self.layout.parameters)
        lost = (scale == 0)[:, :, None, None]
        for use in uses:
            inputs = use.inputs
            grads = use.grads
            if bool(lost.any()):  # 0 * inf would spoil the products
                inputs = inputs.masked_fill(lost, 0.0)
                grads = grads.masked_fill(lost, 0.0)
            grads = (grads.double() * scale[:, :, None, None]).to(grads.dtype).flatten(1, 2)
            weight = params[use.weight]
            totals[use.weight] = torch.bmm(grads.transpose(1, 2), inputs.flatten(1, 2)).view(
                weight.shape
            )
            totals[use.weight + 1] = grads.sum(1)
        return self.layout.rows(totals)

    def passes(
        self, params: Params, batch: Batch, *, start: int = 0
    ) -> tuple[Tensor | None, list[Use]]:
        """Runs the layers from number `start` on forward and backward. Returns the gradients of the
        inputs, which are not needed if the first layer is included, and the uses that give the
        layers' own gradients."""
        outputs = batch.inputs
        saved = []
        for layer in self.layers[start:]:
            outputs, kept = layer.forward(params, outputs)
            saved.append(kept)
        grads: Tensor | None
        if self.loss is cross_entropy and outputs.dim() == 3:  # of single classes
            grads = softmax_minus_one_hot(outputs, batch.targets).mul_(batch.weights.unsqueeze(2))
        else:
            grads = output_gradients(outputs, batch, self.loss)
        uses: list[Use] = []
        for number in reversed(range(max(start, self.first), len(self.layers))):
            assert grads is not None
            grads, found = self.layers[number].backward(
                params, saved[number - start], grads, further=number > self.first
            )
            uses += found
        return grads, uses


def output_gradients(outputs: Tensor, batch: Batch, loss: Loss) -> Tensor:
    """The gradients of weight times loss at outputs (k, n, ...), by PyTorch."""
    with torch.enable_grad():
        given = outputs.detach().flatten(0, 1).requires_grad_()
        losses = loss(given, batch.targets.flatten(0, 1))
    return torch.autograd.grad(losses, given, batch.weights.flatten())[0].view_as(outputs)


def _squared_norms(use: Use) -> Tensor:
    """Squared norms of a layer's per-example gradients, weight and bias, (k, n), float64. With one
    position an example they are products of norms (Goodfellow 2015), in float64 throughout, since
    the square of a small norm could underflow beside a large one. Otherwise the gradients are
    built."""
    grads = use.grads
    inputs = use.inputs
    if inputs.shape[2] == 1:
        return _squares(grads[:, :, 0]) * (_squares(inputs[:, :, 0]) + 1)
    built = torch.matmul(grads.transpose(2, 3), inputs)
    return mass(built.flatten(0, 1), 2).double().view(built.shape[:2]) + _squares(grads.sum(2))


def _squares(values: Tensor) -> Tensor:
    """Squared norms over the last dimension, float64."""
    squares: Tensor = torch.linalg.vector_norm(values, dim=-1, dtype=torch.float64).square()
    return squares


def clip_scale(norms: Tensor, clip_norm: float) -> Tensor:
    """Factors in [0, 1] that clip gradients of these norms to `clip_norm`; 0 for unusable
    norms."""
    return torch.where(norms < LARGEST_NORM, clip_factors(norms, clip_norm), 0.0)


def sequence_of(
    model: nn.Module, input_shape: Shape, *, loss: Loss = cross_entropy
) -> LayerSequence | None:
    """The layers of a model for inputs of `input_shape`; None if a layer or its configuration is
    not supported. Frozen parameters, hooks, and parameters that several layers share are not
    either."""
    values = [value for _, value in model.named_parameters(remove_duplicate=False)]
    if (
        type(model) is not nn.Sequential
        or len({id(value) for value in values}) < len(values)
        or not all(value.requires_grad for value in values)
        or not all(map(unchanged, model.modules()))
    ):
        return None
    way = _Way(input_shape)
    parts = (
        part
        for _, part in model.named_modules(remove_duplicate=False)
        if type(part) is not nn.Sequential
    )
    if (
        not all(type(part) in _READ and _READ[type(part)](way, part) for part in parts)
        or way.first is None
    ):
        return None
    return LayerSequence(tuple(way.layers), ParameterLayout(tuple(way.parameters)), way.first, loss)


class _Way:
    """The path of one example through a model: its current shape and kind. The kinds are "inputs"
    (the layout of the data set), "image" (channels last), "flat image" (the next linear layer's
    weight has the image's order), and "vector". Methods return False for a layer without a
    hand-written pass."""

    def __init__(self, input_shape: Shape) -> None:
        self.layers: list[Layer] = []
        self.parameters: list[tuple[Shape, Shape]] = []  # shapes, and orders of their dimensions
        self.first: int | None = None  # layer with parameters
        self.shape = input_shape
        if len(input_shape) == 1:
            self.kind = "vector"
        else:
            self.kind = "inputs"

    def add(self, layer: Layer) -> bool:
        self.layers.append(layer)
        return True

    def dense(self, weight: Shape, *, in_order_of_image: bool) -> None:
        """A linear layer, also on patches, and its two parameters."""
        if self.first is None:
            self.first = len(self.layers)
        self.add(Dense(len(self.parameters)))
        order = (0, 2, 3, 1) if in_order_of_image else (0, 1)
        self.parameters += [(weight, order), (weight[:1], (0,))]

    def flatten(self, module: nn.Flatten) -> bool:
        if self.kind == "image":
            self.kind = "flat image"
            self.add(Flatten())
        elif self.kind == "inputs":
            self.kind, self.shape = "vector", (math.prod(self.shape),)
            self.add(Flatten())
        return (module.start_dim, module.end_dim) == (1, -1)

    def linear(self, module: nn.Linear) -> bool:
        if module.bias is None or self.kind not in ("vector", "flat image"):
            return False
        self.dense((module.out_features, *self.shape), in_order_of_image=self.kind == "flat image")
        self.kind = "vector"
        self.shape = (module.out_features,)
        return True

    def convolution(self, module: nn.Conv2d) -> bool:
        plain = module.groups == 1 and module.dilation == (1, 1) and module.padding_mode == "zeros"
        if (
            not plain
            or module.bias is None
            or isinstance(module.padding, str)
            or len(self.shape) != 3
        ):
            return False
        kernel, stride, (tall, wide) = (
            _pair(value) for value in (module.kernel_size, module.stride, module.padding)
        )
        geometry = Geometry(kernel, stride, (1, 1), ((tall, tall), (wide, wide)), groups=1)
        patches = Patches(geometry, start=self.kind == "inputs")
        self.add(patches)
        self.dense((module.out_channels, self.shape[0], *kernel), in_order_of_image=True)
        read = self.kind in ("inputs", "image")
        self.kind = "image"
        self.shape = (module.out_channels, *patches.positions(self.shape[1:]))
        return read

    def pool(self, module: nn.MaxPool2d) -> bool:
        plain = (
            _pair(module.padding) == (0, 0)
            and _pair(module.dilation) == (1, 1)
            and self.kind == "image"
        )
        if (
            not plain
            or _pair(module.kernel_size) != (2, 2)
            or module.ceil_mode
            or module.return_indices
        ):
            return False
        channels, height, width = self.shape
        down, across = _pair(module.stride)
        self.shape = (channels, (height - 2) // down + 1, (width - 2) // across + 1)
        return self.add(MaxPool((down, across)))


_READ: dict[type[nn.Module], Callable[[_Way, Any], bool]] = {
    nn.Flatten: _Way.flatten,
    nn.Linear: _Way.linear,
    nn.Conv2d: _Way.convolution,
    nn.MaxPool2d: _Way.pool,
    nn.ReLU: lambda way, _: way.add(RELU),
    nn.Tanh: lambda way, _: way.add(TANH),
}


def _pair(value: int | tuple[int, ...]) -> Pair:
    if isinstance(value, int):
        return (value, value)
    return (value[0], value[1])
