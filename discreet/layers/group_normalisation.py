"""Group normalisation of all examples. Each has a copy of the scales and shifts, so that one
backward pass gives the gradients of all.

PyTorch's backward pass is 3 to 10 times slower in channels last, in which images are on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from discreet.layers.alone import Alone, Rule
from discreet.layers.functions import affine
from discreet.layers.lanes import is_lane, shaped
from discreet.layers.terms import is_processor

_MOST_GROUPS = 2**16 - 1  # of all images, as one dimension of a GPU's grid


def _group_norm(alone: Alone, input: Tensor, groups: int, *args: Any, **named: Any) -> Any:
    """The rule of `torch.group_norm`."""
    weight, bias, eps = affine(args, named)
    rows = alone.rows(input)
    inputs = rows.flatten(0, 1)
    on_processor = is_processor(inputs.device)
    too_many = len(inputs) * groups > _MOST_GROUPS and not on_processor
    if too_many or is_lane(weight) or is_lane(bias):
        return NotImplemented
    last = inputs.dim() == 4 and inputs.is_contiguous(memory_format=torch.channels_last)
    last &= on_processor and inputs.dtype in (torch.float32, torch.float64)
    scales = [
        None if value is None else _of_images(alone.rows(value), rows) for value in (weight, bias)
    ]
    if last:
        outputs = _ChannelsLast.apply(inputs, *scales, groups, eps)  # type: ignore[no-untyped-call]
    else:  # the channels of all images as those of one
        images = inputs.reshape(1, -1, *inputs.shape[2:])
        weight, bias = (None if value is None else value.reshape(-1) for value in scales)
        outputs, *_ = _normed(images, weight, bias, groups * len(inputs), eps)
    return shaped(outputs, rows.shape)


def _of_images(copies: Tensor, rows: Tensor) -> Tensor:
    """Examples' copies, (n, channels), for each of their images, (n * k, channels)."""
    return copies.unsqueeze(1).expand(-1, rows.shape[1], -1).flatten(0, 1)


def _normed(images: Tensor, weight: Any, bias: Any, groups: int, eps: float) -> Any:
    """Outputs for images (N, channels, space...), and means and scales (N, groups)."""
    count, channels = images.shape[:2]
    sizes = count, channels, images[0, 0].numel(), groups
    return torch.native_group_norm(images, weight, bias, *sizes, eps)


class _ChannelsLast(torch.autograd.Function):
    """Group normalisation in channels last. With x the inputs, g the gradients of the outputs, w
    the channels' weights, m and r the mean and scale of a group of k numbers, the gradient of x is
    r w g + b x - b m - r sum(w g) / k, where b = r^3 (m sum(w g) - sum(w g x)) / k, as in PyTorch's
    own backward pass. That of w is r (sum(g x) - m sum(g)), over space."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weights: Tensor | None, biases: Tensor | None, *how: Any
    ) -> Tensor:
        weight, bias = (None if rows is None else rows[0] for rows in (weights, biases))
        outputs, mean, scale = _normed(inputs, weight, bias, *how)
        ctx.save_for_backward(inputs, weights, mean.unsqueeze(2), scale.unsqueeze(2))
        return outputs  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> Any:
        inputs, weights, mean, scale = ctx.saved_tensors
        grouped = (*mean.shape[:2], -1)
        products = (grads * inputs).sum((2, 3)).view(grouped)
        sums = grads.sum((2, 3)).view(grouped)
        factors = torch.ones_like(sums) if weights is None else weights.reshape(grouped)
        inverse = mean.shape[1] / inputs[0].numel()
        total = (sums * factors).sum(2, True)
        slope = total * mean - (products * factors).sum(2, True)
        slope *= scale**3 * inverse
        shift = -slope * mean - total * scale * inverse
        shape = (*inputs.shape[:2], 1, 1)
        slopes, shifts = (each.expand_as(sums).reshape(shape) for each in (slope, shift))
        found = torch.addcmul(shifts, inputs, slopes)
        found.addcmul_(grads, (scale * factors).view(shape))
        of_weights = ((products - sums * mean) * scale).view(shape[:2])
        parts = zip(ctx.needs_input_grad[1:3], (of_weights, sums.view(shape[:2])), strict=True)
        return (found, *(part if needed else None for needed, part in parts), None, None)


RULES: dict[str, Rule] = {"group_norm": _group_norm}
