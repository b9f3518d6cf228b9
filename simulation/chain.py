"""From a model to the chain of layers with passes by hand, where all of its layers have one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from simulation.convolution import ChannelsLast, Convolution, MaxPool, Pair
from simulation.layers import Dense, Layer, Relu, Tanh

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Chain:
    """Layers in order, and the shape of every parameter, with four dimensions where an image is read."""

    layers: tuple[Layer, ...]
    shapes: tuple[Shape, ...]


class _Uncovered(Exception):
    """A layer has no pass by hand."""


def chain_of(model: nn.Module, input_shape: Shape) -> Chain | None:
    """The chain of a model for inputs of `input_shape`; None where a layer, or how it is set, is not covered."""
    if type(model) is not nn.Sequential:
        return None
    builder = _Builder(input_shape)
    try:
        for module in model:
            builder.add(module)
    except _Uncovered:
        return None
    return Chain(tuple(builder.layers), tuple(builder.shapes)) if builder.shapes else None


class _Builder:
    """Follows the shape of one example through a model. `image` is (channels, height, width) until it is flattened."""

    def __init__(self, input_shape: Shape) -> None:
        self.layers: list[Layer] = []
        self.shapes: list[Shape] = []
        self.shape = input_shape
        self.read_image = False  # a convolution has turned the channels last

    def add(self, module: nn.Module) -> None:
        """The layer of a module."""
        add = _ADD.get(type(module))
        if add is None:
            raise _Uncovered
        add(self, module)

    def flatten(self, module: nn.Flatten) -> None:
        """Nothing is computed: the next linear layer reads the image as it is, by a weight of its shape."""
        if (module.start_dim, module.end_dim) != (1, -1):
            raise _Uncovered
        if not self.read_image:
            size = 1
            for length in self.shape:
                size *= length
            self.shape = (size,)

    def linear(self, module: nn.Linear) -> None:
        """A linear layer on what was flattened."""
        if module.bias is None or (len(self.shape) != 1 and not self.read_image):
            raise _Uncovered
        self.layers.append(Dense(len(self.shapes)))
        self.shapes += [(module.out_features, *self.shape), (module.out_features,)]
        self.shape, self.read_image = (module.out_features,), False

    def convolution(self, module: nn.Conv2d) -> None:
        """A convolution on an image."""
        plain = module.groups == 1 and module.dilation == (1, 1) and module.padding_mode == "zeros"
        if not plain or module.bias is None or isinstance(module.padding, str) or len(self.shape) != 3:
            raise _Uncovered
        if not self.read_image:
            self.layers.append(ChannelsLast())
        kernel, stride, padding = _pair(module.kernel_size), _pair(module.stride), _pair(module.padding)
        self.layers.append(Convolution(len(self.shapes), kernel, stride, padding))
        self.shapes += [tuple(module.weight.shape), (module.out_channels,)]
        lengths = zip(self.shape[1:], kernel, stride, padding, strict=True)
        self.shape = (module.out_channels, *((size + 2 * pad - wide) // step + 1 for size, wide, step, pad in lengths))
        self.read_image = True

    def pool(self, module: nn.MaxPool2d) -> None:
        """A pooling layer on an image."""
        plain = _pair(module.padding) == (0, 0) and _pair(module.dilation) == (1, 1)
        if not plain or module.ceil_mode or module.return_indices or not self.read_image:
            raise _Uncovered
        kernel, stride = _pair(module.kernel_size), _pair(module.stride)
        self.layers.append(MaxPool(kernel, stride))
        lengths = zip(self.shape[1:], kernel, stride, strict=True)
        self.shape = (self.shape[0], *((size - wide) // step + 1 for size, wide, step in lengths))

    def relu(self, module: nn.ReLU) -> None:
        """An activation."""
        self.layers.append(Relu())

    def tanh(self, module: nn.Tanh) -> None:
        """An activation."""
        self.layers.append(Tanh())


_ADD = {
    nn.Flatten: _Builder.flatten,
    nn.Linear: _Builder.linear,
    nn.Conv2d: _Builder.convolution,
    nn.MaxPool2d: _Builder.pool,
    nn.ReLU: _Builder.relu,
    nn.Tanh: _Builder.tanh,
}


def _pair(value: int | tuple[int, ...]) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
