"""Rules of functions for sequences of different lengths: packing, padding, and the CTC loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from discreet.layers.alone import Alone, Rule, Shared
from discreet.layers.functions import by_name
from discreet.layers.lanes import is_lane, parted


def _pack(alone: Alone, inputs: Tensor, lengths: Tensor, batch_first: bool) -> Any:
    """Packs sequences, whose lengths must be equal; examples of equal lengths run together."""
    if not is_lane(lengths) or lengths.shape != (1,):
        return NotImplemented
    sizes = alone.rows(lengths)[:, 0]
    alone.split_by(sizes, "pack_padded_sequence")
    rows = alone.rows(inputs).squeeze(1 if batch_first else 2)
    return rows[:, : int(sizes[0])], Shared(torch.ones(int(sizes[0]), dtype=torch.int64))


def _pad(alone: Alone, data: Tensor, sizes: Tensor, batch_first: bool, *args: Any) -> Any:
    """Pads packed sequences of equal lengths."""
    if not is_lane(data) or is_lane(sizes):
        return NotImplemented
    padding, total = args
    rows = alone.rows(data)
    more = max(total, 0) - rows.shape[1]
    if more > 0:
        rows = functional.pad(rows, (*[0, 0] * (rows.dim() - 2), 0, more), value=padding)
    return rows.unsqueeze(1 if batch_first else 2), torch.full((alone.count, 1), len(sizes))


def _pad_sequence(
    alone: Alone,
    sequences: Sequence[Tensor],
    batch_first: bool = False,
    padding_value: float = 0.0,
    padding_side: str = "right",
) -> Any:
    """Pads sequences (T, ...) of different T to one tensor."""
    if any(alone.slot(value) is not None for value in sequences):
        return NotImplemented
    rows = [alone.rows(value) for value in sequences]
    longest = max(value.shape[1] for value in rows)
    padded = []
    for value in rows:
        missing = longest - value.shape[1]
        around = (0, missing) if padding_side == "right" else (missing, 0)
        wide = (*[0, 0] * (value.dim() - 2), *around)
        padded.append(functional.pad(value, wide, value=padding_value))
    return torch.stack(padded, 1 if batch_first else 2)


def _ctc(alone: Alone, probabilities: Tensor, targets: Tensor, *args: Any, **named: Any) -> Any:
    """The CTC loss for log probabilities (T, k, classes), targets (k, S), and the lengths of
    both, (k,)."""
    names = ("input_lengths", "target_lengths", "blank", "reduction", "zero_infinity")
    given = by_name(names, args, named)
    lengths = [given.pop(name) for name in ("input_lengths", "target_lengths")]
    tensors = (probabilities, targets, *lengths)
    if not all(map(is_lane, tensors)) or targets.dim() != 2 or given.get("reduction", 1) != 0:
        return NotImplemented
    rows = alone.rows(probabilities).transpose(1, 2).flatten(0, 1).transpose(0, 1)
    run: Any = torch.ctc_loss
    found = run(rows, *(alone.rows(part).flatten(0, 1) for part in tensors[1:]), **given)
    return parted(found, alone.count)


RULES: dict[str, Rule] = {
    "pack_padded_sequence": _pack,
    "pad_packed_sequence": _pad,
    "pad_sequence": _pad_sequence,
    "ctc_loss": _ctc,
}
