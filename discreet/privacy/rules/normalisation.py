"""Normalisation within an example: LayerNorm, RMSNorm and GroupNorm."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

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
    return values.flatten(2).sum(2) if values.dim() > 2 else values


def layer_norm(tape: Tape, layer: nn.LayerNorm, inputs: Tensor) -> Tensor:
    shape = list(layer.normalized_shape)
    tape.rows(inputs, least=len(shape) + 1)
    outputs = functional.layer_norm(inputs, shape, layer.weight, layer.bias, layer.eps)
    return _note(tape, layer, outputs, lambda: functional.layer_norm(inputs, shape, eps=layer.eps), _last(len(shape)))


def rms_norm(tape: Tape, layer: nn.RMSNorm, inputs: Tensor) -> Tensor:
    shape = list(layer.normalized_shape)
    tape.rows(inputs, least=len(shape) + 1)
    outputs = functional.rms_norm(inputs, shape, layer.weight, layer.eps)
    return _note(tape, layer, outputs, lambda: functional.rms_norm(inputs, shape, eps=layer.eps), _last(len(shape)))


def group_norm(tape: Tape, layer: nn.GroupNorm, inputs: Tensor) -> Tensor:
    tape.rows(inputs, least=2)
    groups = layer.num_groups
    outputs = functional.group_norm(inputs, groups, layer.weight, layer.bias, layer.eps)
    return _note(tape, layer, outputs, lambda: functional.group_norm(inputs, groups, eps=layer.eps), _channels)


NORMALISATION_RULES: dict[type[nn.Module], Rule] = {
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: rms_norm,
    nn.GroupNorm: group_norm,
}
