"""Rules for linear layers, embeddings and normalisation, and the calls that are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from discreet.privacy.ghost.recorder import Records, Rule
from discreet.privacy.ghost.terms import Entry, Lookup, Outer, Pair, Rows, Slot
from discreet.privacy.ghost.uncovered import Uncovered

Affine = tuple[Tensor | None, Tensor | None]  # weight and bias
Gather = Callable[[Tensor], Tensor]


def matrix_entries(weight: Slot | None, bias: Slot | None, inputs: Tensor, grads: Tensor) -> list[Entry]:
    """Entries for outputs = inputs @ weight.T + bias; inputs (n, ..., d), grads (n, ..., p)."""
    if grads.dim() == 2:
        return [Pair(weight, bias, inputs, grads)]
    grads = grads.flatten(1, -2)
    entries: list[Entry] = [] if weight is None else [Outer(weight, inputs.flatten(1, -2), grads)]
    return entries if bias is None else [*entries, Rows(bias, grads.sum(1))]


def linear(records: Records, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    records.refuse(input)
    outputs = functional.linear(input, weight, bias)
    weight_slot, bias_slot = records.slot(weight), records.slot(bias)
    if weight_slot or bias_slot:
        records.add(input, outputs, lambda grads: matrix_entries(weight_slot, bias_slot, input, grads))
    return outputs


def embedding(
    records: Records,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    *options: Any,
    **more: Any,
) -> Tensor:
    names = ("max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    settings = {**dict(zip(names, options, strict=False)), **more}
    if settings.get("max_norm") is not None or settings.get("scale_grad_by_freq"):
        raise ValueError("an embedding with max_norm or scale_grad_by_freq mixes examples: switch both off")
    outputs = functional.embedding(input, weight, padding_idx)
    slot = records.slot(weight)
    if slot is not None:
        records.add(input, outputs, lambda grads: [_lookup(slot, input, grads, padding_idx)])
    return outputs


def _lookup(slot: Slot, ids: Tensor, grads: Tensor, padding_idx: int | None) -> Entry:
    ids, grads = ids.reshape(len(ids), -1), grads.reshape(len(ids), -1, grads.shape[-1])
    if padding_idx is not None:
        grads = grads.masked_fill((ids == padding_idx % slot.shape[0]).unsqueeze(2), 0)
    return Lookup(slot, ids, grads)


def _record_affine(
    records: Records, call: tuple[Tensor, Tensor], parameters: Affine, normal: Callable[[], Tensor], gather: Gather
) -> Tensor:
    """Write down outputs = normal() * weight + bias; gather sums the positions at which an example uses an entry."""
    inputs, outputs = call
    records.refuse(inputs)
    weight, bias = (records.slot(value) for value in parameters)

    def entries(grads: Tensor) -> list[Entry]:
        scaled: list[Entry] = [] if weight is None else [Rows(weight, gather(grads * normal()))]
        return scaled if bias is None else [*scaled, Rows(bias, gather(grads))]

    if weight or bias:
        records.add(inputs, outputs, entries)
    return outputs


def last(dims: int) -> Gather:
    """Sum over all dimensions but the first and the last few: (n, positions..., shape...) -> (n, shape...)."""

    def gather(values: Tensor) -> Tensor:
        positions = tuple(range(1, values.dim() - dims))
        return values.sum(positions) if positions else values

    return gather


def _channels(values: Tensor) -> Tensor:
    """(n, channels, space...) -> (n, channels)."""
    return values.flatten(2).sum(2) if values.dim() > 2 else values


def layer_norm(
    records: Records,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    shape = list(normalized_shape)
    if input.dim() == len(shape):
        raise Uncovered("a normalisation over the batch dimension")
    outputs = functional.layer_norm(input, shape, weight, bias, eps)

    def normal() -> Tensor:
        return functional.layer_norm(input, shape, eps=eps)

    return _record_affine(records, (input, outputs), (weight, bias), normal, last(len(shape)))


def rms_norm(
    records: Records,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    shape = list(normalized_shape)
    if input.dim() == len(shape):
        raise Uncovered("a normalisation over the batch dimension")
    outputs = functional.rms_norm(input, shape, weight, eps)

    def normal() -> Tensor:
        return functional.rms_norm(input, shape, eps=eps)

    return _record_affine(records, (input, outputs), (weight, None), normal, last(len(shape)))


def group_norm(
    records: Records,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    outputs = functional.group_norm(input, num_groups, weight, bias, eps)

    def normal() -> Tensor:
        return functional.group_norm(input, num_groups, eps=eps)

    return _record_affine(records, (input, outputs), (weight, bias), normal, _channels)


def _dropout(by_default: bool) -> Rule:
    def dropout(
        records: Records, input: Tensor, p: float = 0.5, training: bool = by_default, inplace: bool = False
    ) -> Tensor:
        if training and p > 0:
            raise ValueError("dropout draws random numbers: use eval mode, or set p to 0")
        return input

    return dropout


def batch_norm(records: Records, *inputs: Any, **more: Any) -> NoReturn:
    raise ValueError("batch normalisation mixes examples, so no example has a gradient of its own: use GroupNorm")


def view(records: Records, input: Tensor, *shape: Any, **more: Any) -> Tensor:
    """A view, for code that expects outputs of convolutions in PyTorch's default memory format."""
    records.refuse(input)
    if input.dim() == 4 and not input.is_contiguous() and input.is_contiguous(memory_format=torch.channels_last):
        input = input.contiguous()
    result: Tensor = input.view(*shape, **more)
    return result


LAYER_RULES: dict[Any, Rule] = {
    functional.linear: linear,
    functional.embedding: embedding,
    functional.layer_norm: layer_norm,
    functional.rms_norm: rms_norm,
    functional.group_norm: group_norm,
    functional.batch_norm: batch_norm,
    torch.batch_norm: batch_norm,
    functional.dropout: _dropout(True),
    functional.dropout1d: _dropout(True),
    functional.dropout2d: _dropout(True),
    functional.dropout3d: _dropout(True),
    functional.alpha_dropout: _dropout(False),
    functional.feature_alpha_dropout: _dropout(False),
    Tensor.view: view,
}
