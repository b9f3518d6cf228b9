"""Group normalisation of all examples. Its backward pass shares sums with the gradients of its
scales.

PyTorch's backward pass is 3 to 10 times slower in channels last, in which images are here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from discreet.layers.alone import Alone
from discreet.layers.functions import by_name
from discreet.layers.lanes import is_lane, new_parted, shaped, summed
from discreet.layers.terms import Rows, Term, is_processor

_MOST_GROUPS = 2**16 - 1  # of all images, as one dimension of a GPU's grid


def group_norm(alone: Alone, input: Tensor, groups: int, *args: Any, **named: Any) -> Any:
    """The rule of `torch.group_norm`."""
    weight, bias, eps = affine(args, named)
    if is_lane(weight) or is_lane(bias):
        return NotImplemented
    rows = alone.rows(input)
    inputs = rows.flatten(0, 1)
    last = inputs.dim() == 4 and inputs.is_contiguous(memory_format=torch.channels_last)
    last &= is_processor(inputs.device) and inputs.dtype in (torch.float32, torch.float64)
    if not last and len(inputs) * groups <= _MOST_GROUPS:
        scales = [_by_example(alone, value, len(inputs)) for value in (weight, bias)]
        # The channels of all examples as those of one: so one backward pass gives all gradients.
        images = inputs.reshape(1, -1, *inputs.shape[2:])
        outputs = Normal(groups * len(inputs), eps).of(images, *scales)
        return shaped(outputs, rows.shape)
    normal = Normal(groups, eps)
    if last:
        outputs = _ChannelsLast.apply(inputs, weight, bias, normal)  # type: ignore[no-untyped-call]
    else:
        outputs = normal.of(inputs.contiguous(), weight, bias)
    held = alone.slot(weight)
    added = alone.slot(bias)

    def terms(grads: Tensor) -> list[Term]:
        products, sums = normal.sums(inputs, grads)
        found: list[Term] = [] if added is None else [Rows(added, summed(sums, alone.count))]
        if held is None:
            return found
        return [Rows(held, summed(normal.by_scale(products, sums), alone.count)), *found]

    if held is not None or added is not None:
        alone.note(outputs, terms)
    return new_parted(outputs, len(rows))


def _by_example(alone: Alone, value: Tensor | None, count: int) -> Tensor | None:
    """A copy of a channels' parameter for each of `count` images, (count * channels,)."""
    if value is None:
        return None
    copies = alone.rows(value)
    return copies.unsqueeze(1).expand(-1, count // len(copies), -1).reshape(-1)


def affine(args: Sequence[Any], named: dict[str, Any]) -> Iterable[Any]:
    """The weight, bias and eps of a norm."""
    default = {"weight": None, "bias": None, "eps": 1e-5}
    return (default | by_name(default, args, named)).values()


def over_space(values: Tensor) -> Tensor:
    """Sums over space, (N, channels, space...) -> (N, channels)."""
    if values.dim() > 2:
        return values.sum(tuple(range(2, values.dim())))
    return values


class Normal:
    """The means and scales (N, groups) of a normalisation of images (N, channels, space...), and
    sums that its gradients need."""

    def __init__(self, groups: int, eps: float) -> None:
        self.groups = groups
        self.eps = eps
        self.mean = self.scale = torch.empty(0)
        self.found: tuple[Tensor, Tensor] | None = None

    def of(self, inputs: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """The outputs of inputs (N, channels, space...)."""
        count, channels = inputs.shape[:2]
        size = inputs[0, 0].numel()
        outputs, self.mean, self.scale = torch.native_group_norm(
            inputs, weight, bias, count, channels, size, self.groups, self.eps
        )
        return outputs

    def sums(self, inputs: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
        """The sums over space of grads * inputs and of grads, (N, channels)."""
        if self.found is None:
            self.found = over_space(grads * inputs), over_space(grads)
        return self.found

    def by_scale(self, products: Tensor, sums: Tensor) -> Tensor:
        """The gradients of the channels' scales, (N, channels), from sums over space, without
        normalising a second time."""
        shifted = self.by_group(products) - self.by_group(sums) * self.mean.unsqueeze(2)
        return (shifted * self.scale.unsqueeze(2)).view(products.shape)

    def by_group(self, values: Tensor) -> Tensor:
        """(N, channels) as (N, groups, channels of a group)."""
        return values.reshape(len(values), self.groups, -1)


class _ChannelsLast(torch.autograd.Function):
    """Group normalisation in channels last. With x the inputs, g the gradients of the outputs, w
    the channels' weights, m and r the mean and scale of a group of k numbers, the gradient of x is
    r w g + b x - b m - r sum(w g) / k, where b = r^3 (m sum(w g) - sum(w g x)) / k, as in PyTorch's
    own backward pass."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor | None, bias: Tensor | None, normal: Normal
    ) -> Tensor:
        ctx.normal = normal
        ctx.save_for_backward(inputs, weight)
        return normal.of(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> Any:
        inputs, weight = ctx.saved_tensors
        normal: Normal = ctx.normal
        shape = (*inputs.shape[:2], 1, 1)
        factors = torch.ones_like(inputs[0, :, 0, 0]) if weight is None else weight
        products, sums = (
            normal.by_group(each * factors).sum(2) for each in normal.sums(inputs, grads)
        )
        inverse = normal.groups / inputs[0].numel()
        slope = (sums * normal.mean - products) * normal.scale**3 * inverse
        shift = -slope * normal.mean - sums * normal.scale * inverse
        channels = inputs.shape[1] // normal.groups
        slopes, shifts, scales = (
            each.repeat_interleave(channels, 1).view(shape) for each in (slope, shift, normal.scale)
        )
        found = torch.addcmul(shifts, inputs, slopes)
        return found.addcmul_(grads, scales * factors.view(1, -1, 1, 1)), None, None, None
