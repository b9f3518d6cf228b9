"""The weights of convolutions: a convolution is a matrix product over patches of its input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from discreet.layers.alone import Alone, Rule
from discreet.layers.functions import by_name
from discreet.layers.lanes import is_lane, parted, shaped
from discreet.layers.terms import (
    Grams,
    Outer,
    Parts,
    Rows,
    Slot,
    Term,
    floats_at_once,
    gram_mass,
    grams_are_cheaper,
    is_processor,
)

_PATCH_FLOATS = 2**19  # patches held at once: 2 MB, so that they stay in the processor's cache
# For each output channel. So few patches take little memory, and a matrix product is faster.
_FEW_PATCHES = 4


@dataclass(frozen=True, slots=True)
class Geometry:
    """Kernel size, stride, dilation and (left, right) padding by spatial dimension, and the number
    of groups. `channels_last`: they run fastest in a patch, else the kernel's places do."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    groups: int
    channels_last: bool = True

    def width(self, inputs: Tensor) -> int:
        """The length of a patch of one group."""
        return torch.Size(self.kernel).numel() * inputs.shape[1] // self.groups

    def ends(self, space: Sequence[int]) -> list[int]:
        """The spatial size of the outputs for inputs of a size."""
        ways = zip(space, self.padding, self.kernel, self.stride, self.dilation, strict=True)
        return [(size + sum(ps) - dil * (k - 1) - 1) // jump + 1 for size, ps, k, jump, dil in ways]

    def padded(self, inputs: Tensor) -> Tensor:
        """Inputs (n, channels, *space) with their padding."""
        sides = [side for sides in reversed(self.padding) for side in sides]
        return functional.pad(inputs, sides) if any(sides) else inputs

    def patches(self, inputs: Tensor) -> Tensor:
        """(n, channels, *space) -> (n, groups, positions, kernel * channels / groups)."""
        data = self.padded(inputs)
        data = data.movedim(1, -1).contiguous() if self.channels_last else data.contiguous()
        first, *steps = data.stride()
        step = steps.pop(-1 if self.channels_last else 0)
        width = inputs.shape[1] // self.groups
        ends = self.ends(inputs.shape[2:])
        positions = [
            (end, each * jump) for end, each, jump in zip(ends, steps, self.stride, strict=True)
        ]
        window = [
            (k, each * dil) for k, each, dil in zip(self.kernel, steps, self.dilation, strict=True)
        ]
        window.insert(len(window) if self.channels_last else 0, (width, step))
        dims = [(len(data), first), (self.groups, width * step), *positions, *window]
        windows = data.as_strided([size for size, _ in dims], [step for _, step in dims])
        return windows.contiguous().view(len(data), self.groups, -1, self.width(inputs))


@dataclass(frozen=True, slots=True)
class Convolved:
    """The weight of a convolution with one group, called `times` times: inputs (n, times, channels,
    *space) and grads (n, times, positions, out). Patches are made for some examples at a time, and
    never held: they are many times larger than inputs."""

    slot: Slot
    geometry: Geometry
    inputs: Tensor
    grads: Tensor

    @property
    def call(self) -> tuple[Geometry, torch.Size]:
        """The properties that calls must share to be processed together."""
        return self.geometry, self.inputs.shape

    def outer(self, some: slice = slice(None)) -> Outer:
        """The matrix product over the patches of some examples."""
        inputs = self.inputs[some]
        grads = self.grads[some]
        patches = self.geometry.patches(inputs.flatten(0, 1))
        return Outer(
            self.slot, patches.view(len(inputs), -1, patches.shape[3]), grads.flatten(1, 2)
        )

    def cheapest(self, order: int) -> Term:
        """This term, or the built gradients if they are cheaper for norms of this order."""
        count, times, positions, out = self.grads.shape
        width = self.geometry.width(self.inputs[:, 0])
        if order == 2 and grams_are_cheaper(count, times * positions, width, out):
            return self
        return self.built()

    def built(self) -> Rows:
        """The built gradients, (n, out, width)."""
        parts = zip(self.inputs.unbind(1), self.grads.unbind(1), strict=True)
        return Rows(self.slot, reduce(Tensor.add_, (built(self.geometry, *part) for part in parts)))

    def mass(self, order: int) -> Tensor:
        return gram_mass([self.grams()])

    def grams(self) -> Grams:
        """What L2 norms need of the Gram matrices."""
        held = floats_at_once(_PATCH_FLOATS, self.inputs.device)
        step = max(
            1, held // (self.grads[0, ..., 0].numel() * self.geometry.width(self.inputs[:, 0]))
        )
        starts = range(0, len(self.inputs), step)
        found = [self.outer(slice(start, start + step)).grams() for start in starts]
        if len(found) == 1:
            return found[0]
        inner, squares, widths = zip(*found, strict=True)
        return Grams(torch.cat(inner), torch.cat(squares, 1), widths[0])

    def add_to(self, parts: Parts, weights: Tensor) -> None:
        are_few = self.grads[..., 0].numel() <= _FEW_PATCHES * self.slot.shape[0]
        if are_few and is_processor(weights.device):
            self.outer().add_to(parts, weights)
            return
        way = self.geometry
        inputs = self.inputs.flatten(0, 1)
        padding = [side for side, _ in way.padding]
        if any(before != after for before, after in way.padding):
            inputs = way.padded(inputs)
            padding = [0] * len(padding)
        ends = way.ends(self.inputs.shape[3:])
        rows = (self.grads * weights.view(-1, 1, 1, 1)).flatten(0, 1).movedim(-1, 1)
        grads = rows.reshape(len(inputs), -1, *ends)
        like = inputs.new_empty(self.slot.shape)
        sizes = way.stride, padding, way.dilation, False, [0] * len(padding), 1
        (_, found, _) = torch.ops.aten.convolution_backward(
            grads, inputs, like, None, *sizes, [False, True, False]
        )
        parts.add(self.slot.index, found)


def built(geometry: Geometry, inputs: Tensor, grads: Tensor) -> Tensor:
    """The gradients, (n, out, width), built for some examples at a time: patches are many times
    larger than inputs."""
    count, positions, out = grads.shape
    groups = geometry.groups
    width = geometry.width(inputs)
    rows = grads.new_empty(count, out, width)
    if inputs.shape[1] == groups > 1 and is_processor(inputs.device):
        return _built_by_channel(geometry, inputs, grads, rows)
    step = max(1, floats_at_once(_PATCH_FLOATS, inputs.device) // (positions * groups * width))
    for start in range(0, count, step):
        some = slice(start, start + step)
        by_group = grads[some].view(-1, positions, groups, out // groups).permute(0, 2, 3, 1)
        patches = geometry.patches(inputs[some])
        torch.bmm(
            by_group.flatten(0, 1),
            patches.flatten(0, 1),
            out=rows[some].view(-1, out // groups, width),
        )
    return rows


def _built_by_channel(geometry: Geometry, inputs: Tensor, grads: Tensor, rows: Tensor) -> Tensor:
    """The same for a depthwise convolution, written into `rows`: each place of the kernel is a
    product of shifted inputs and grads. Patches would be matrices of one row each."""
    data = geometry.padded(inputs).movedim(1, -1)
    ends = geometry.ends(inputs.shape[2:])
    values = grads.view(len(grads), *ends, geometry.groups, -1)
    space = tuple(range(1, 1 + len(ends)))
    ways = list(zip(ends, geometry.stride, geometry.dilation, strict=True))
    for number, places in enumerate(product(*map(range, geometry.kernel))):
        window = [
            slice(at * dil, at * dil + jump * (end - 1) + 1, jump)
            for at, (end, jump, dil) in zip(places, ways, strict=True)
        ]
        shifted = data[(slice(None), *window)].unsqueeze(-1)
        rows[:, :, number] = (shifted * values).sum(space).flatten(1)
    return rows


def _convolution(dims: int, *, turned: bool = False) -> Rule:
    """The rule of a convolution; `turned`: a transposed one, in which inputs and output gradients
    swap roles."""
    if turned:
        name = f"conv_transpose{dims}d"
    else:
        name = f"conv{dims}d"
    run: Any = getattr(functional, name)

    def rule(
        alone: Alone, input: Tensor, weight: Tensor, bias: Any = None, *args: Any, **named: Any
    ) -> Any:
        if is_lane(weight) or is_lane(bias) or input.dim() not in (dims + 1, dims + 2):
            return NotImplemented
        given = _arguments(args, named, turned=turned)
        if turned and any(_each(given["output_padding"], dims)):
            return NotImplemented
        rows = alone.rows(input)
        if input.dim() == dims + 1:
            inputs = rows
        else:
            inputs = rows.flatten(0, 1)
        # With channels last, patches are runs of memory and pooling is several times as fast.
        if dims == 2 and not turned and is_processor(inputs.device):
            inputs = _channels_last(inputs)
        outputs = run(inputs, weight, bias, **given)
        held = alone.slot(weight)
        added = alone.slot(bias)
        if held is not None or added is not None:
            geometry = _geometry(given, weight)
            use = _Use(geometry, held, added, alone.count, turned)
            alone.note(outputs, lambda grads: use.terms(inputs, grads))
        if inputs is rows or input.dim() == dims + 1:
            return outputs
        return shaped(outputs, (*rows.shape[:2], *outputs.shape[1:]))

    return rule


@dataclass(frozen=True, slots=True)
class _Use:
    """A convolution's use of its weight and bias, for `count` examples with one or more images
    each."""

    geometry: Geometry
    weight: Slot | None
    bias: Slot | None
    count: int
    turned: bool

    def terms(self, inputs: Tensor, grads: Tensor) -> list[Term]:
        values = inputs.to(grads.dtype)
        images, others = (grads, values) if self.turned else (values, grads)
        rows = others.movedim(1, -1).flatten(1, -2)
        found: list[Term] = []
        if self.bias is not None:
            if self.turned:
                sums = grads.flatten(2).sum(2)
            else:
                sums = rows.sum(1)
            found.append(Rows(self.bias, self._of_examples(sums).sum(1)))
        if self.weight is None:
            return found
        slot = replace(self.weight, kernel_last=self.geometry.channels_last)
        if self.geometry.groups == 1:
            convolved = Convolved(
                slot, self.geometry, self._of_examples(images), self._of_examples(rows)
            )
            return [convolved, *found]
        return [Rows(slot, self._of_examples(built(self.geometry, images, rows)).sum(1)), *found]

    def _of_examples(self, values: Tensor) -> Tensor:
        return parted(values, self.count)


_NAMES = ("stride", "padding", "dilation", "groups")
_TURNED_NAMES = ("stride", "padding", "output_padding", "groups", "dilation")


def _arguments(args: Sequence[Any], named: dict[str, Any], *, turned: bool) -> dict[str, Any]:
    """All arguments after the bias, by name."""
    default: dict[str, Any] = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    names = _TURNED_NAMES if turned else _NAMES
    if turned:
        default |= {"output_padding": 0}
    return default | by_name(names, args, named)


def _each(value: Any, dims: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * dims
    return tuple(value) * (dims if len(value) == 1 else 1)


def _channels_last(images: Tensor) -> Tensor:
    """Images (n, channels, height, width) in channels-last memory layout. A single channel is laid
    out so too, which PyTorch takes for channels first."""
    if images.shape[1] == 1:
        return images.squeeze(1).unsqueeze(3).movedim(3, 1)
    return images.contiguous(memory_format=torch.channels_last)


def _geometry(given: dict[str, Any], weight: Tensor) -> Geometry:
    kernel = weight.shape[2:]
    dims = len(kernel)
    stride = _each(given["stride"], dims)
    dilation = _each(given["dilation"], dims)
    padding = given["padding"]
    if isinstance(padding, str):
        total = [
            dil * (size - 1) if padding == "same" else 0
            for dil, size in zip(dilation, kernel, strict=True)
        ]
        sides = tuple((each // 2, each - each // 2) for each in total)
    else:
        sides = tuple((side, side) for side in _each(padding, dims))
    last = is_processor(weight.device)
    return Geometry(tuple(kernel), stride, dilation, sides, given["groups"], last)


RULES: dict[str, Rule] = {
    **{f"conv{dims}d": _convolution(dims) for dims in (1, 2, 3)},
    **{f"conv_transpose{dims}d": _convolution(dims, turned=True) for dims in (1, 2, 3)},
}
