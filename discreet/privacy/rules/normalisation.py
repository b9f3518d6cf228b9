"""Normalisation within an example: LayerNorm, RMSNorm, GroupNorm and InstanceNorm; or by statistics that stay."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

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


def layer_norm(tape: Tape, layer: nn.LayerNorm | nn.RMSNorm, inputs: Tensor) -> Tensor:
    shape, bias = list(layer.normalized_shape), getattr(layer, "bias", None)
    tape.rows(inputs, least=len(shape) + 1)
    run: Callable[..., Tensor] = functional.layer_norm if isinstance(layer, nn.LayerNorm) else functional.rms_norm
    outputs = normal = run(inputs, shape, eps=layer.eps)
    if layer.weight is not None:  # by itself: the gradient needs what comes before
        outputs = normal * layer.weight if bias is None else torch.addcmul(bias, normal, layer.weight)
    return _note(tape, layer, outputs, lambda: normal, _last(len(shape)))


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


def channel_norm(tape: Tape, layer: _NormBase, inputs: Tensor) -> Tensor:
    """InstanceNorm; and BatchNorm in eval mode, which scales each channel by numbers that no example changes."""
    check_statistics("", layer)
    batch, mean, variance = isinstance(layer, _BatchNorm), layer.running_mean, layer.running_var
    tape.rows(inputs, least=2 if batch else 3)

    def normal(weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        if batch:
            return functional.batch_norm(inputs, mean, variance, weight, bias, eps=layer.eps)
        return functional.instance_norm(inputs, mean, variance, weight, bias, mean is None, eps=layer.eps)

    return _note(tape, layer, normal(layer.weight, layer.bias), normal, _channels)


NORMALISATION_RULES: dict[type[nn.Module], Rule] = {
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm), layer_norm),
    nn.GroupNorm: group_norm,
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm), channel_norm),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), channel_norm),
}
