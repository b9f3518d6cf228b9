"""Dropout, and attention with dropout. Each example has masks of its own (`draws.py`), in less time
than PyTorch's on a CPU."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from discreet.layers.alone import Alone, Rule
from discreet.layers.draws import Draws

_SHARES = 2**16  # a probability is rounded to a multiple of 1 / _SHARES, whatever draws by it
# The values at negative infinity of SELU, for alpha dropout (Klambauer et al. 2017).
_ALPHA = 1.7580993408473766


def kept_share(p: float) -> int:
    """The probability that a value is kept, 1 - p, in multiples of 2^-16."""
    return round((1 - p) * _SHARES)


def rounded(p: float) -> float:
    """The probability with which dropout of rate `p` drops."""
    return 1 - kept_share(p) / _SHARES


def dropped(name: str, values: Tensor, p: float, draws: Draws) -> Tensor:
    """A dropout function of PyTorch, by name, for values (n, ...) of n examples; each example is a
    batch. It takes 16 random bits for each number of a mask."""
    kept = kept_share(p)
    if draws.key is None or kept == _SHARES or not values.numel():
        return values
    shape = values.shape
    if "feature" in name:  # one number for each channel of a row
        shape = torch.Size([*shape[:3], *[1] * (len(shape) - 3)])
    if "alpha" in name:
        rate = 1 - kept / _SHARES
        scale = 1 / math.sqrt((_ALPHA * _ALPHA * rate + 1) * (1 - rate)) if kept else 0.0
        mask = _mask(shape, kept, values, draws)
        return values * (mask * scale) + (mask - 1 + rate) * (_ALPHA * scale)
    return values * _mask(shape, kept, values, draws).mul_(_SHARES / max(kept, 1))


def _mask(shape: torch.Size, kept: int, like: Tensor, draws: Draws) -> Tensor:
    """Ones with probability `kept` / 2^16, else zeros, of a shape (n, ...)."""
    each = shape[1:].numel()
    bits = draws.words(-(-each // 4), like.device).view(torch.int16)
    factors = torch.empty(shape, dtype=like.dtype, device=like.device)
    torch.lt(bits[:, :each], kept - _SHARES // 2, out=factors.view(len(bits), each))
    return factors


def attended(
    parts: Sequence[Tensor], mask: Tensor | None, draws: Draws, how: Mapping[str, Any]
) -> Tensor:
    """Attention with dropout (n, ..., T, d), in a third of the time of PyTorch's; `parts` are
    queries, keys and values, whose first dimension is the examples', or has as many rows for each
    of them. `how`: PyTorch's arguments by name. As there, a row whose mask hides everything is
    0."""
    query, key, value = parts
    if how.get("enable_gqa"):
        more = query.shape[-3] // key.shape[-3]
        key, value = (each.repeat_interleave(more, -3) for each in (key, value))
    scale = how.get("scale")
    each = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * each) @ key.transpose(-2, -1)
    if how.get("is_causal"):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    p = how["dropout_p"]
    if mask is None:
        return _dropped_rows(scores.softmax(-1), p, draws) @ value
    if mask.dtype == torch.bool:
        mask = scores.new_zeros(mask.shape).masked_fill_(~mask, -math.inf)
    seen = (mask > -math.inf).any(-1, keepdim=True)
    least = torch.finfo(scores.dtype).min
    weights = (scores + mask.clamp(min=least)).softmax(-1)
    return (_dropped_rows(weights, p, draws) @ value) * seen.to(value)


def _dropped_rows(weights: Tensor, p: float, draws: Draws) -> Tensor:
    grouped = weights.reshape(len(draws.identities), -1, *weights.shape[1:])
    return dropped("dropout", grouped, p, draws).reshape(weights.shape)


def _dropout(name: str, alone: Alone, input: Tensor, p: float, training: bool) -> Any:
    """The rule of a dropout function, by name."""
    if not 0 <= p <= 1:
        return NotImplemented
    rows = alone.rows(input)
    if training:
        return dropped(name, rows, p, alone.draws)
    return rows


RULES: dict[str, Rule] = {
    name: partial(_dropout, name)
    for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
}
