"""Normalisation within an example: LayerNorm, RMSNorm, GroupNorm and InstanceNorm; or by statistics that stay."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from discreet.privacy.rules.terms import Rows, Rule, Tape, Term

Gather = Callable[[Tensor], Tensor]  # sums the positions at which an example uses an entry of the weight


def _note(tape: Tape, layer: nn.Module, outputs: Tensor, normal: Callable[[], Tensor], gather: Gather) -> Tensor:
    """Notes outputs = normal() * weight + bias on the tape; the layer may have either or none."""
    weight, bias = (tape.slot(getattr(layer, name, None)) for name in ("weight", "bias"))

    def terms(grads: Tensor) -> list[Term]:
        found: list[Term] = [] if weight is None else [Rows(weight, gather(grads * normal()))]
        return found if bias is None else [*found, Rows(bias, gather(grads))]

    if weight or bias:
        tape.add(outputs, terms)
    return outputs


def _last(dims: int) -> Gather:
    """Sums over all dimensions but the first and the last few: (n, positions..., shape...) -> (n, shape...)."""

    def gather(values: Tensor) -> Tensor:
        positions = tuple(range(1, values.dim() - dims))
        return values.sum(positions) if positions else values

    return gather


def _channels(values: Tensor) -> Tensor:
    """(n, channels, space...) -> (n, channels)."""
    return values.sum(tuple(range(2, values.dim()))) if values.dim() > 2 else values


def layer_norm(tape: Tape, layer: nn.LayerNorm, inputs: Tensor) -> Tensor:
    shape = list(layer.normalized_shape)
    tape.rows(inputs, least=len(shape) + 1)
    normal = functional.layer_norm(inputs, shape, eps=layer.eps)
    return _note(tape, layer, _scaled(layer, normal), lambda: normal, _last(len(shape)))


def rms_norm(tape: Tape, layer: nn.RMSNorm, inputs: Tensor) -> Tensor:
    shape = list(layer.normalized_shape)
    tape.rows(inputs, least=len(shape) + 1)
    normal = functional.rms_norm(inputs, shape, eps=layer.eps)
    return _note(tape, layer, _scaled(layer, normal), lambda: normal, _last(len(shape)))


def _scaled(layer: nn.LayerNorm | nn.RMSNorm, normal: Tensor) -> Tensor:
    """The last step of a layer by itself: what comes before it is needed for the gradient, and not computed again."""
    bias = getattr(layer, "bias", None)
    if layer.weight is None:
        return normal
    return normal * layer.weight if bias is None else torch.addcmul(bias, normal, layer.weight)


def group_norm(tape: Tape, layer: nn.GroupNorm, inputs: Tensor) -> Tensor:
    """The gradient of the weight follows from sums over space, as in PyTorch's own backward pass, without normalising
    a second time."""
    tape.rows(inputs, least=2)
    count, channels, groups = *inputs.shape[:2], layer.num_groups
    last = inputs.dim() == 4 and not inputs.is_cuda and inputs.is_contiguous(memory_format=torch.channels_last)
    inputs = inputs if last else inputs.contiguous()
    positions = inputs[0, 0].numel()
    outputs, mean, scale = torch.native_group_norm(
        inputs, layer.weight, layer.bias, count, channels, positions, groups, layer.eps
    )
    weight, bias = tape.slot(layer.weight), tape.slot(layer.bias)

    def terms(grads: Tensor) -> list[Term]:
        sums = _channels(grads)
        found: list[Term] = [] if bias is None else [Rows(bias, sums)]
        if weight is None:
            return found
        products, shifts = (value.view(count, groups, -1) for value in (_channels(grads * inputs), sums))
        rows = (products - shifts * mean.unsqueeze(2)) * scale.unsqueeze(2)
        return [Rows(weight, rows.view(count, channels)), *found]

    if weight or bias:
        tape.add(outputs, terms)
    return outputs


def check_statistics(name: str, layer: nn.Module) -> None:
    """ValueError for a layer whose statistics are those of the batch, or change with it."""
    batch, running = isinstance(layer, _BatchNorm), getattr(layer, "running_mean", None) is not None
    if isinstance(layer, _NormBase) and (layer.training if running else batch):
        kind = type(layer).__name__
        raise ValueError(
            f"{f'layer {name!r} ({kind})' if name else kind} mixes examples: use GroupNorm instead "
            "(discreet.to_group_norm makes it)"
            + (", or put the layer in eval mode, so that its statistics stay as they are" if running else "")
        )


def frozen_norm(tape: Tape, layer: _BatchNorm, inputs: Tensor) -> Tensor:
    """BatchNorm in eval mode: each channel is shifted and scaled by numbers that no example changes."""
    check_statistics("", layer)
    tape.rows(inputs, least=2)

    def normal(weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return functional.batch_norm(inputs, layer.running_mean, layer.running_var, weight, bias, eps=layer.eps)

    return _note(tape, layer, normal(layer.weight, layer.bias), normal, _channels)


def instance_norm(tape: Tape, layer: _InstanceNorm, inputs: Tensor) -> Tensor:
    check_statistics("", layer)
    tape.rows(inputs, least=3)

    def normal(weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        mean, variance = layer.running_mean, layer.running_var
        use_input = mean is None
        return functional.instance_norm(inputs, mean, variance, weight, bias, use_input, eps=layer.eps)

    return _note(tape, layer, normal(layer.weight, layer.bias), normal, _channels)


NORMALISATION_RULES: dict[type[nn.Module], Rule] = {
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: rms_norm,
    nn.GroupNorm: group_norm,
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm), frozen_norm),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), instance_norm),
}
