"""The rule of bags of embeddings: sums or means of rows of a table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from discreet.layers.alone import Alone, Rule
from discreet.layers.lanes import is_lane, parted
from discreet.layers.terms import Lookup, Term


def _embedding_bag(
    alone: Alone, input: Tensor, weight: Tensor, offsets: Any = None, **named: Any
) -> Any:
    mode = named.get("mode", "mean")
    padding = named.get("padding_idx")
    if padding is not None and padding < 0:
        padding += len(weight)
    if (
        offsets is not None
        or named.get("per_sample_weights") is not None
        or named.get("scale_grad_by_freq")
        or input.dim() != 2
        or is_lane(weight)
    ):
        return NotImplemented
    slot = alone.slot(weight)
    ids = alone.rows(input)
    if slot is None or mode not in ("sum", "mean"):
        return NotImplemented
    bags = ids.flatten(0, 1)
    outputs = functional.embedding_bag(bags, weight, mode=mode, padding_idx=padding)

    def terms(grads: Tensor) -> list[Term]:
        if padding is None:
            shares = torch.ones_like(bags, dtype=grads.dtype)
        else:
            shares = (bags != padding).to(grads)
        if mode == "mean":
            shares = shares / shares.sum(1, keepdim=True).clamp(min=1)
        rows = parted(shares.unsqueeze(2) * grads.unsqueeze(1), alone.count).flatten(1, 2)
        return [Lookup(slot, ids.long().flatten(1), rows)]

    return parted(alone.note(outputs, terms), alone.count)


RULES: dict[str, Rule] = {"embedding_bag": _embedding_bag}
