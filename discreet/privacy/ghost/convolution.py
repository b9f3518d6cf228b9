"""Rules for convolutions: a convolution is a matrix product over patches of its input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from discreet.privacy.ghost.recorder import Records, Rule
from discreet.privacy.ghost.terms import Entry, Lookup, Outer, Rows, Slot, Term, grams_are_cheaper
from discreet.privacy.ghost.uncovered import Uncovered

_PATCH_FLOATS = 2**19  # patches held at once: 2 MB, so that they stay in the processor's cache


@dataclass(frozen=True, slots=True)
class Geometry:
    """Kernel size, stride, dilation and (left, right) padding by spatial dimension, and the number of groups."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    groups: int

    def width(self, inputs: Tensor) -> int:
        """The length of a patch of one group."""
        return torch.Size(self.kernel).numel() * inputs.shape[1] // self.groups

    def patches(self, inputs: Tensor) -> Tensor:
        """(n, channels, *space) -> (n, groups, positions, kernel * channels / groups), channels running fastest."""
        data = inputs.movedim(1, -1)
        if any(sides != (0, 0) for sides in self.padding):
            data = functional.pad(data, (0, 0, *(side for sides in reversed(self.padding) for side in sides)))
        data = data.contiguous()
        count, *space, channels = data.shape
        first, *steps, _ = data.stride()
        width = channels // self.groups
        ways = list(zip(space, steps, self.kernel, self.stride, self.dilation, strict=True))
        positions = [((size - dil * (k - 1) - 1) // jump + 1, step * jump) for size, step, k, jump, dil in ways]
        window = [(k, step * dil) for _, step, k, _, dil in ways]
        dims = _coalesced([(count, first), (self.groups, width), *positions, *window, (width, 1)])
        windows = data.as_strided([size for size, _ in dims], [step for _, step in dims])
        return windows.contiguous().view(count, self.groups, -1, self.width(inputs))


def _coalesced(dims: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same (size, stride) dimensions in fewer, so that patches are copied in long runs of memory."""
    merged = [(1, 1)]
    for size, step in reversed(dims):
        inner, stride = merged[0]
        if size == 1:
            continue
        if inner == 1:
            merged[0] = (size, step)
        elif step == inner * stride:
            merged[0] = (inner * size, stride)
        else:
            merged.insert(0, (size, step))
    return merged


def _tuple(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values


def _sides(
    padding: int | str | Sequence[int], kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    sizes = (0,) * len(kernel) if isinstance(padding, str) else _tuple(padding, len(kernel))
    return tuple((size, size) for size in sizes)


@dataclass(frozen=True, slots=True)
class Convolved:
    """A convolution's weight: inputs (n, channels, *space), grads (n, positions, out)."""

    slot: Slot
    geometry: Geometry
    inputs: Tensor
    grads: Tensor

    def slots(self) -> list[Slot]:
        return [self.slot]

    def split(self) -> list[Outer | Rows | Lookup]:
        if self.geometry.groups > 1:
            return [self.built()]
        return [Outer(self.slot, self.geometry.patches(self.inputs)[:, 0], self.grads)]

    def ready(self, order: int) -> Term:
        count, positions, out = self.grads.shape
        if self.geometry.groups > 1 or order == 1:
            return self.built()
        if not grams_are_cheaper(count, positions, self.geometry.width(self.inputs), out):
            return self.built()
        return Outer(self.slot, self.geometry.patches(self.inputs)[:, 0], self.grads).ready(order)

    def built(self) -> Rows:
        """The gradients themselves, some examples at a time: patches are many times larger than inputs."""
        count, positions, out = self.grads.shape
        groups, width = self.geometry.groups, self.geometry.width(self.inputs)
        rows = self.grads.new_empty(count, out, width)
        step = max(1, _PATCH_FLOATS // (positions * groups * width))
        for start in range(0, count, step):
            some = slice(start, start + step)
            grads = self.grads[some].view(-1, positions, groups, out // groups).permute(0, 2, 3, 1)
            patches = self.geometry.patches(self.inputs[some])
            torch.bmm(grads.flatten(0, 1), patches.flatten(0, 1), out=rows[some].view(-1, out // groups, width))
        return Rows(self.slot, rows)


def _rule(dims: int, run: Callable[..., Tensor]) -> Rule:
    def convolution(
        records: Records,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: int | Sequence[int] = 1,
        padding: int | str | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> Tensor:
        records.refuse(input)
        if input.dim() != dims + 2:
            raise Uncovered("a convolution without a batch dimension")
        if dims == 2:  # patches are then runs of memory, and pooling is several times as fast
            input = input.contiguous(memory_format=torch.channels_last)
        layout = weight.to(memory_format=torch.channels_last) if dims == 2 else weight
        outputs = run(input, layout, bias, stride, padding, dilation, groups)
        weight_slot, bias_slot = records.slot(weight), records.slot(bias)
        if not (weight_slot or bias_slot):
            return outputs
        kernel, steps = tuple(weight.shape[2:]), _tuple(dilation, dims)
        geometry = Geometry(kernel, _tuple(stride, dims), steps, _sides(padding, kernel, steps), groups)

        def entries(grads: Tensor) -> list[Entry]:
            rows = grads.movedim(1, -1).flatten(1, -2)
            found: list[Entry] = [] if bias_slot is None else [Rows(bias_slot, rows.sum(1))]
            if weight_slot is None:
                return found
            return [*found, Convolved(replace(weight_slot, kernel_last=True), geometry, input, rows)]

        records.add(input, outputs, entries)
        return outputs

    return convolution


CONVOLUTION_RULES: dict[Any, Rule] = {
    functional.conv1d: _rule(1, functional.conv1d),
    functional.conv2d: _rule(2, functional.conv2d),
    functional.conv3d: _rule(3, functional.conv3d),
}
