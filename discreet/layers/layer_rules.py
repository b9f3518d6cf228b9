"""Rules: functions of PyTorch that run for all examples at once, below vmap (`alone.py`).

A rule takes the pass and the function's arguments: values of one example, trainable parameters, and
values that all examples share. It returns tensors of all examples, (n, ...), or NotImplemented, and
notes the uses of parameters. Then the norms of all gradients follow from inputs and output
gradients, without building them (`terms.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from discreet.layers.alone import Alone, Rule
from discreet.layers.functions import OF_ATTENTION, affine, by_name
from discreet.layers.lanes import is_lane, parted, shaped
from discreet.layers.terms import Lookup, Rows, Slot, Term, product_terms


def positions(values: Tensor) -> Tensor:
    """(n, ..., d) as (n, d) or (n, T, d)."""
    if values.dim() == 2:
        return values
    rows = values.flatten(1, -2) if values.dim() > 3 else values
    if rows.shape[1] == 1:
        return rows[:, 0]
    return rows


def by_example(values: Tensor, count: int) -> Tensor:
    """Positions (n * T, d) of `count` examples as (n, d) or (n, T, d)."""
    rows, width = values.shape
    if rows == count:
        return values
    return values.view(count, rows // count, width)


def _fits(*parameters: Any) -> bool:
    """True if no parameter differs between examples."""
    return True not in map(is_lane, parameters)


def _product(
    alone: Alone, inputs: Tensor, weight: Tensor, bias: Tensor | None, *, turned: bool
) -> Any:
    """inputs @ weight.T + bias, or with `turned` inputs @ weight + bias."""
    if weight.dim() != 2 or not _fits(weight, bias) or inputs.dim() < 1:
        return NotImplemented
    if bias is not None and len(bias) != weight.shape[1 if turned else 0]:  # it is broadcast
        return NotImplemented
    held = alone.slot(weight)
    added = alone.slot(bias)
    rows = alone.rows(inputs)
    # The product is taken on rows. With more dimensions its outputs would be a view, whose edge an
    # in-place activation would move.
    flat = rows.flatten(0, -2)
    outputs = functional.linear(flat, weight.t() if turned else weight, bias)
    if held is not None or added is not None:

        def terms(grads: Tensor) -> list[Term]:
            parts = by_example(flat, alone.count), by_example(grads, alone.count)
            return product_terms(held, added, *parts, turned=turned)

        alone.note(outputs, terms)
    return shaped(outputs, (*rows.shape[:-1], outputs.shape[-1]))


def _linear(alone: Alone, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    return _product(alone, input, weight, bias, turned=False)


def _addmm(alone: Alone, bias: Tensor, inputs: Tensor, weight: Tensor, **named: Any) -> Any:
    if named or bias.dim() != 1 or is_lane(weight):
        return NotImplemented
    return _product(alone, inputs, weight, bias, turned=True)


def _matmul(alone: Alone, left: Tensor, right: Tensor) -> Any:
    if is_lane(right) or right.dim() != 2 or not is_lane(left):
        return NotImplemented
    return _product(alone, left, right, None, turned=True)


def _embedding(
    alone: Alone,
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    by_frequency: bool = False,
    *_: bool,
) -> Any:
    """The last argument asks for sparse gradients, of which the sum would be dense."""
    if is_lane(weight) or by_frequency:
        return NotImplemented
    slot = alone.slot(weight)
    ids = alone.rows(indices)
    outputs = torch.embedding(weight, ids, padding_idx)
    if slot is not None:
        alone.note(outputs, lambda grads: [_lookup(slot, ids, grads, padding_idx)])
    return outputs


def _lookup(slot: Slot, ids: Tensor, grads: Tensor, padding: int) -> Term:
    places = ids.long().reshape(len(ids), -1)
    # contiguous: the norm and the sum would each copy them
    rows = grads.reshape(*places.shape, grads.shape[-1]).contiguous()
    return Lookup(
        slot, places, rows if padding < 0 else rows.masked_fill((places == padding).unsqueeze(2), 0)
    )


Gather = Callable[[Tensor], Tensor]


def _scaled(
    alone: Alone,
    outputs: Tensor,
    scales: Sequence[Any],
    normal: Callable[[], Tensor],
    gather: Gather,
) -> None:
    """Notes outputs = normal * weight + bias. `gather` sums over the positions at which an example
    uses an entry."""
    held, added = map(alone.slot, scales)
    if held is None and added is None:
        return

    def terms(grads: Tensor) -> list[Term]:
        found: list[Term] = [] if held is None else [Rows(held, gather(grads * normal()))]
        if added is None:
            return found
        return [*found, Rows(added, gather(grads))]

    alone.note(outputs, terms)


def _layer_norm(alone: Alone, input: Tensor, shape: Sequence[int], *args: Any, **named: Any) -> Any:
    weight, bias, eps = affine(args, named)
    if not _fits(weight, bias):
        return NotImplemented
    rows = alone.rows(input)
    shape = list(shape)
    outputs = functional.layer_norm(rows, shape, weight, bias, eps)

    def normal() -> Tensor:
        wide = rows.float() if rows.dtype == torch.bfloat16 else rows
        return functional.layer_norm(wide, shape, eps=eps)

    _scaled(alone, outputs, (weight, bias), normal, _over_positions(len(shape)))
    return outputs


def _rms_norm(
    alone: Alone, input: Tensor, shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> Any:
    if not _fits(weight):
        return NotImplemented
    rows = alone.rows(input)
    shape = list(shape)
    normal = functional.rms_norm(rows, shape, eps=eps)
    if weight is None:
        return normal
    # Applied separately: its gradient needs the values before it.
    outputs = normal * weight
    _scaled(alone, outputs, (weight, None), lambda: normal, _over_positions(len(shape)))
    return outputs


def _over_positions(dims: int) -> Gather:
    """Sums over the dimensions between the first and the last `dims`."""

    def gather(values: Tensor) -> Tensor:
        between = tuple(range(1, values.dim() - dims))
        if between:
            return values.sum(between)
        return values

    return gather


def _channel_norm(alone: Alone, name: str, input: Tensor, *args: Any) -> Any:
    """InstanceNorm, and BatchNorm in evaluation mode, which scales each channel by fixed
    numbers."""
    weight, bias, mean, variance, training, _, eps = args[:7]
    if not _fits(weight, bias, mean) or (training and (name == "batch_norm" or mean is not None)):
        return NotImplemented
    rows = alone.rows(input)
    inputs = rows.flatten(0, 1)
    run: Any = partial(functional.instance_norm, use_input_stats=training)
    if name == "batch_norm":
        run = functional.batch_norm
    outputs = run(inputs, mean, variance, weight, bias, eps=eps)

    def normal() -> Tensor:
        return run(inputs, mean, variance, eps=eps)  # type: ignore[no-any-return]

    def gather(values: Tensor) -> Tensor:
        return values.reshape(alone.count, -1, inputs.shape[1], inputs[0, 0].numel()).sum((1, 3))

    _scaled(alone, outputs, (weight, bias), normal, gather)
    return shaped(outputs, rows.shape)


def _attention(alone: Alone, *args: Any, **named: Any) -> Any:
    """Attention has no parameters; vmap alone would decompose it."""
    named = by_name(OF_ATTENTION, args, named)
    query, *_ = parts = [named.pop(name) for name in OF_ATTENTION[:3]]
    mask = named.pop("attn_mask", None)
    wide = query.dim()
    if wide not in (3, 4) or any(part.dim() != wide for part in parts):
        return NotImplemented
    *parts, mask = map(alone.copied, (*parts, mask))
    rows = [alone.rows(part).flatten(0, wide - 3) for part in parts]
    if is_lane(mask) or (mask is not None and mask.dim() == 4 and len(mask) > 1):
        mask = _mask(alone.rows(mask), query)
    if not named.get("dropout_p"):
        found = functional.scaled_dot_product_attention(rows[0], rows[1], rows[2], mask, **named)
    else:
        from discreet.layers.dropping import attended

        found = attended(rows, mask, alone.draws, named)
    if wide == 4:
        return parted(found, alone.count)
    return found


def _mask(masks: Tensor, query: Tensor) -> Tensor:
    """Masks (n, ..., T, S) for queries in which examples and their batches are one dimension."""
    if query.dim() == 4:
        batches = query.shape[0]
    else:
        batches = 1
    wide = masks.reshape(len(masks), *[1] * (query.dim() + 1 - masks.dim()), *masks.shape[1:])
    if query.dim() == 4:
        return wide.expand(-1, batches, *[-1] * (wide.dim() - 2)).flatten(0, 1)
    return wide


def _rrelu(alone: Alone, input: Tensor, lower: float, upper: float, training: bool) -> Any:
    if training:
        return NotImplemented
    return functional.leaky_relu(alone.rows(input), (lower + upper) / 2)


def _cross_entropy(
    alone: Alone,
    outputs: Tensor,
    targets: Tensor,
    weight: Tensor | None,
    reduction: int,
    *of: float,
) -> Any:
    """Cross-entropy of class numbers; vmap alone would decompose it. `of` is the class that is
    ignored, and the label smoothing."""
    ignored, smoothing = of
    is_mean = reduction == 1
    if (
        not (is_lane(outputs) and is_lane(targets) and _fits(weight))
        or outputs.dim() < 2
        or targets.is_floating_point()
        or smoothing
        or (is_mean and weight is not None)
    ):
        return NotImplemented
    classes = alone.rows(targets)
    logits = alone.rows(outputs).flatten(0, 1)
    run: Any = functional.cross_entropy
    found = run(logits, classes.flatten(0, 1), weight, ignore_index=ignored, reduction="none")
    found = parted(found, alone.count)
    if reduction == 0:
        return found
    found = found.flatten(1).sum(1)
    if is_mean:
        return found / (classes != ignored).flatten(1).sum(1)
    return found


_CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
# The functions whose rules are in another file of this folder, by file.
OTHER_FILES = {
    "convolution": [f"conv{way}{dims}d" for way in ("", "_transpose") for dims in (1, 2, 3)],
    "custom_functions": ["applied"],
    "dropping": ["dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"],
    "embedding_bag": ["embedding_bag"],
    "group_normalisation": ["group_norm"],
    "recurrent": ["lstm_layer", *_CELLS, *(f"{kind}_cell" for kind in _CELLS)],
    "sequences": ["pack_padded_sequence", "pad_packed_sequence", "pad_sequence", "ctc_loss"],
}


def _of_file(file: str, name: str) -> Rule:
    """The rule of a function in another file, which is loaded when a model first calls that
    function."""

    def rule(alone: Alone, *args: Any, **named: Any) -> Any:
        rules = import_module(f"discreet.layers.{file}").RULES
        return rules[name](alone, *args, **named)

    return rule


RULES: dict[str, Rule] = {
    "linear": _linear,
    "addmm": _addmm,
    "matmul": _matmul,
    "mm": _matmul,
    "embedding": _embedding,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "batch_norm": lambda alone, *args: _channel_norm(alone, "batch_norm", *args),
    "instance_norm": lambda alone, *args: _channel_norm(alone, "instance_norm", *args),
    "scaled_dot_product_attention": _attention,
    "rrelu": _rrelu,
    "cross_entropy_loss": _cross_entropy,
    **{name: _of_file(file, name) for file, names in OTHER_FILES.items() for name in names},
}
