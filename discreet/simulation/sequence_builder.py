"""From a model to the sequence of its layers with passes by hand, if all of its layers have one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn

from discreet.privacy.rules.convolution import Geometry
from discreet.privacy.rules.objective import Loss, cross_entropy
from discreet.privacy.rules.recurrent import ClassesSecond as ClassesSecondModule
from discreet.privacy.rules.recurrent import LastStep as LastStepModule
from discreet.privacy.rules.recurrent import LSTMLayer
from discreet.privacy.rules.terms import unchanged
from discreet.simulation.batched_convolution import ChannelsLast, Convolution, MaxPool, Pair
from discreet.simulation.layer_sequence import LayerSequence, layout_of
from discreet.simulation.layers import (
    ClassesSecond,
    Dense,
    DenseAtEachStep,
    Embedding,
    LastStep,
    Layer,
    Recurrence,
    Relu,
    Tanh,
)

Shape = tuple[int, ...]

TRAINED = (Dense, DenseAtEachStep, Convolution, Embedding, Recurrence)


class _Uncovered(Exception):
    """A layer has no pass by hand."""


def sequence_of(model: nn.Module, input_shape: Shape, *, loss: Loss = cross_entropy) -> LayerSequence | None:
    """The layers of a model for inputs of `input_shape`; None if one of them, or how it is set, is not covered.

    Nor are frozen parameters, hooks, and parameters that several layers share: clients of such a model are trained one
    by one.
    """
    if type(model) is not nn.Sequential or not _is_plain(model):
        return None
    builder = _Builder(input_shape)
    try:
        builder.sequence(model)
    except _Uncovered:
        return None
    if not builder.shapes or builder.in_steps:
        return None
    first = next(number for number, layer in enumerate(builder.layers) if isinstance(layer, TRAINED))
    return LayerSequence(tuple(builder.layers), layout_of(builder.shapes, builder.orders), first, loss)


def _is_plain(model: nn.Sequential) -> bool:
    """Whether all parameters are trained, each by one layer, and layers do what their classes say."""
    values = [value for _, value in model.named_parameters(remove_duplicate=False)]
    shared = len({id(value) for value in values}) < len(values)
    return not shared and all(value.requires_grad for value in values) and all(map(unchanged, model.modules()))


class _Builder:
    """Follows the shape of one example through a model. `image` is (channels, height, width) until it is flattened."""

    def __init__(self, input_shape: Shape) -> None:
        self.layers: list[Layer] = []
        self.shapes: list[Shape] = []
        self.orders: list[Shape] = []
        self.shape = input_shape
        self.read_image = False  # a convolution has turned the channels last
        self.flattened = len(input_shape) == 1

    def add(self, module: nn.Module) -> None:
        """The layer of a module."""
        add = _ADD.get(type(module))
        if add is None:
            raise _Uncovered
        add(self, module)

    def sequence(self, module: nn.Sequential) -> None:
        """Layers one after the other."""
        for part in module:
            self.add(part)

    def flatten(self, module: nn.Flatten) -> None:
        """Nothing is computed: the next linear layer reads the image as it is, by a weight of its shape."""
        if (module.start_dim, module.end_dim) != (1, -1) or (
            self.layers and not self.read_image and len(self.shape) > 1
        ):
            raise _Uncovered
        self.flattened = True
        if not self.read_image:
            self.shape = (math.prod(self.shape),)

    def linear(self, module: nn.Linear) -> None:
        """A linear layer on what was flattened, or on each step of a sequence."""
        if module.bias is None or not (self.flattened or self.in_steps):
            raise _Uncovered
        if not self.flattened:
            self.layers.append(DenseAtEachStep(len(self.shapes)))
            self.shapes += [(module.out_features, self.shape[1]), (module.out_features,)]
            self.orders += [(0, 1), (0,)]
            self.shape = (self.shape[0], module.out_features)
            return
        self.layers.append(Dense(len(self.shapes)))
        self.shapes += [(module.out_features, *self.shape), (module.out_features,)]
        self.orders += [(0, 2, 3, 1) if self.read_image else (0, 1), (0,)]
        self.shape, self.read_image = (module.out_features,), False

    def convolution(self, module: nn.Conv2d) -> None:
        """A convolution on an image."""
        plain = module.groups == 1 and module.dilation == (1, 1) and module.padding_mode == "zeros"
        if (
            not plain
            or module.bias is None
            or isinstance(module.padding, str)
            or len(self.shape) != 3
            or self.flattened
        ):
            raise _Uncovered
        if not self.read_image:
            self.layers.append(ChannelsLast())
        kernel, stride, padding = _pair(module.kernel_size), _pair(module.stride), _pair(module.padding)
        sides = ((padding[0], padding[0]), (padding[1], padding[1]))
        layer = Convolution(len(self.shapes), Geometry(kernel, stride, (1, 1), sides, groups=1))
        self.layers.append(layer)
        self.shapes += [(module.out_channels, self.shape[0], *kernel), (module.out_channels,)]
        self.orders += [(0, 2, 3, 1), (0,)]
        self.shape = (module.out_channels, *layer.output_size((self.shape[1], self.shape[2])))
        self.read_image = True

    def pool(self, module: nn.MaxPool2d) -> None:
        """A pooling layer on an image."""
        plain = _pair(module.padding) == (0, 0) and _pair(module.dilation) == (1, 1)
        plain = plain and _pair(module.kernel_size) == (2, 2) and not (module.ceil_mode or module.return_indices)
        if not plain or not self.read_image or self.flattened:
            raise _Uncovered
        stride = _pair(module.stride)
        self.layers.append(MaxPool(stride))
        self.shape = (
            self.shape[0],
            *((size - 2) // step + 1 for size, step in zip(self.shape[1:], stride, strict=True)),
        )

    def embedding(self, module: nn.Embedding) -> None:
        """Vectors for token numbers."""
        plain = module.max_norm is None and module.padding_idx is None and not module.scale_grad_by_freq
        if not plain or self.layers:
            raise _Uncovered
        self.layers.append(Embedding(len(self.shapes)))
        self.shapes.append((module.num_embeddings, module.embedding_dim))
        self.orders.append((0, 1))
        self.shape, self.flattened = (*self.shape, module.embedding_dim), False

    def recurrence(self, module: LSTMLayer) -> None:
        """An LSTM layer on a sequence."""
        gates, hidden = module.hidden_weight.shape
        self.layers.append(Recurrence(len(self.shapes)))
        self.shapes += [(gates, self.shape[1]), (gates, hidden), (gates,)]
        self.orders += [(0, 1), (0, 1), (0,)]
        self.shape = (self.shape[0], hidden)

    @property
    def in_steps(self) -> bool:
        """Whether the layers so far give something at each step."""
        return bool(self.layers) and isinstance(self.layers[0], Embedding) and len(self.shape) == 2

    def classes_second(self, module: ClassesSecondModule) -> None:
        """The end of a model that gives something at each step: no layer can read it."""
        if not self.in_steps:
            raise _Uncovered
        self.layers.append(ClassesSecond())
        self.shape = (self.shape[1], self.shape[0], 1, 1)

    def last_step(self, module: LastStepModule) -> None:
        """The end of a sequence."""
        if len(self.shape) != 2 or not isinstance(self.layers[-1], Recurrence):
            raise _Uncovered
        self.layers.append(LastStep())
        self.shape, self.flattened = self.shape[1:], True

    def relu(self, module: nn.ReLU) -> None:
        """An activation."""
        self.layers.append(Relu())

    def tanh(self, module: nn.Tanh) -> None:
        """An activation."""
        self.layers.append(Tanh())


_ADD: dict[type[nn.Module], Callable[[_Builder, Any], None]] = {
    nn.Sequential: _Builder.sequence,
    nn.Flatten: _Builder.flatten,
    nn.Linear: _Builder.linear,
    nn.Conv2d: _Builder.convolution,
    nn.MaxPool2d: _Builder.pool,
    nn.Embedding: _Builder.embedding,
    LSTMLayer: _Builder.recurrence,
    LastStepModule: _Builder.last_step,
    ClassesSecondModule: _Builder.classes_second,
    nn.ReLU: _Builder.relu,
    nn.Tanh: _Builder.tanh,
}


def _pair(value: int | tuple[int, ...]) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
