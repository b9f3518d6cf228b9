"""The weights of convolutions: a convolution is a matrix product over patches of its input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from discreet.per_example.terms import Outer, Rows, Slot, Term, grams_are_cheaper

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


def weight_term(slot: Slot, geometry: Geometry, inputs: Tensor, grads: Tensor, order: int) -> Term:
    """The weight's part: inputs (n, channels, *space), grads (n, positions, out)."""
    count, positions, out = grads.shape
    gram = order == 2 and geometry.groups == 1
    slot = replace(slot, kernel_last=True)
    if gram and grams_are_cheaper(count, positions, geometry.width(inputs), out):
        return Outer(slot, geometry.patches(inputs)[:, 0], grads).cheapest(order)
    return Rows(slot, built(geometry, inputs, grads))


def built(geometry: Geometry, inputs: Tensor, grads: Tensor) -> Tensor:
    """The gradients themselves, (n, out, width), some examples at a time: patches are many times larger than inputs."""
    count, positions, out = grads.shape
    groups, width = geometry.groups, geometry.width(inputs)
    rows = grads.new_empty(count, out, width)
    step = max(1, _PATCH_FLOATS // (positions * groups * width))
    for start in range(0, count, step):
        some = slice(start, start + step)
        by_group = grads[some].view(-1, positions, groups, out // groups).permute(0, 2, 3, 1)
        patches = geometry.patches(inputs[some])
        torch.bmm(by_group.flatten(0, 1), patches.flatten(0, 1), out=rows[some].view(-1, out // groups, width))
    return rows
