"""Sums in floating point and their noise, rounded together, so that the noise has no low bits.

A float sum s is released as round(s + X), in multiples of a public step: a power of two, far below
the noise. It is made as k + round(r + X) from the nearest multiple k and the rest r, which are both
exact. So the release is the exact mechanism on s and then a rounding, whatever s is: its accounting
holds unchanged. `discreet.privacy.grid` has the same for sums that are exact themselves; what is
said there of attacks, of time and of PyTorch's functions holds here.

A Gaussian value comes from uniforms of 127 and 128 bits. It is first computed from 63 and 32 of
them, mostly in float32 (`fast_pairs`). If the error of that could reach a rounding boundary, about
once in 10,000 draws, more bits are made and the value is computed again in float64, and in decimals
if that can't tell either. `grid_slack` for LARGEST_SCALE bounds the remaining error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from hashlib import shake_256

import numpy as np
import torch
from torch import Tensor

from discreet.privacy.grid import (
    ERROR,
    LAPLACE,
    check_finite,
    grid_slack,
    laplace_grid_slack,
    nearest_steps,
    second_normal,
)
from discreet.privacy.randomness import (
    CHUNK,
    FEW_BITS,
    GPU_PAIRS,
    LOW_63_BITS,
    PAIRS,
    RandomSource,
    Words,
    fast_pairs,
    scratch,
    signed,
)

FINENESS = 16  # least noise, in steps: rounding adds at most 0.04 % to its variance
LARGEST_SCALE = 2.0 * FINENESS
FINE = 2**20  # the same for Laplace noise, which is computed in float64 anyway
# Bound on the error of a normal value of `fast_pairs`, over its radius, in units of 2^-24: 3.5 for
# the radius, 9.5 for the angle, 4 for cosine or sine, and 1 each for their product and for a sum.
FAST_ERROR = 20 * 2.0**-24
REST_ERROR = 2.0**-23  # what adding a rest to that may err, in steps
KEY_WORDS = 4
LARGEST_RADIUS = 7.4  # beyond (chance 2^-39), 63 bits are too few for FAST_ERROR


def step_for(scale: float, fineness: int = FINENESS) -> float:
    """The largest power of two that is at most `scale` > 0, of the noise, over `fineness`.

    >>> step_for(1.0) == 2.0**-4
    True
    """
    return math.ldexp(0.5, math.frexp(scale / fineness)[1])


def rounded_gaussian(total: Tensor, stddev: float, source: RandomSource) -> Tensor:
    """`total`, float32 or float64 of any shape, plus Gaussians of `stddev` > 0, in whole multiples
    of `step_for(stddev)`: of the same shape, type and device.

    Raises ValueError: `total` is not finite in steps.
    """
    step = step_for(stddev)
    if total.device.type == "cpu":
        at_once = 2 * PAIRS
    else:
        at_once = 2 * GPU_PAIRS

    def noised(rest: Tensor) -> Tensor:
        return _gaussian_steps(rest, stddev / step, source)

    return _released(total, step, noised, at_once)


def rounded_laplace(total: Tensor, scale: float, source: RandomSource) -> Tensor:
    """As `rounded_gaussian`, for Laplace noise of `scale` and `step_for(scale, FINE)`."""
    step = step_for(scale, FINE)

    def noised(rest: Tensor) -> Tensor:
        words = signed(source.words(len(rest)))
        key = source.words(KEY_WORDS).tobytes()
        offset = rest.double().cpu()
        return nearest_steps(words, scale / step, key, law=LAPLACE, offset=offset).to(rest.device)

    return _released(total, step, noised, CHUNK)


def _released(
    total: Tensor, step: float, noised: Callable[[Tensor], Tensor], at_once: int
) -> Tensor:
    """The total in multiples of `step`, of which `noised` rounds the rests with their noise."""
    steps = total.reshape(-1) / step  # a power of two, so this is exact
    check_finite(steps)
    if not len(steps):
        return total.clone()
    for part in torch.split(steps, at_once):
        whole = part.round()
        rest = part.sub_(whole)
        # The exact sum is rounded to the type of the total once: what leaves follows from it alone.
        torch.add(whole, noised(rest), out=part)
    return steps.mul_(step).reshape(total.shape)


def gaussian_slack(count: int) -> float:
    """Bound on the total variation distance of `count` values of `rounded_gaussian` from exact
    ones, rounded."""
    return grid_slack(count, LARGEST_SCALE)


def laplace_slack(count: int) -> float:
    """The same for `rounded_laplace`."""
    return laplace_grid_slack(count, 2.0 * FINE)


def _gaussian_steps(rest: Tensor, scale: float, source: RandomSource) -> Tensor:
    """Gaussians of `scale` steps plus a rest (n,) in [-1/2, 1/2], rounded: float32, (n,), which the
    next call overwrites."""
    count = len(rest)
    pairs = (count + 1) // 2
    scratch.reserve(pairs + KEY_WORDS)
    drawn = scratch.words[: KEY_WORDS + pairs + (pairs + 1) // 2]
    source.fill(drawn.numpy())
    words = drawn[KEY_WORDS:]
    if rest.device.type == "cpu":
        used = scratch.used[: len(words)].copy_(words)
        values = scratch.values[: 2 * pairs]
        nearest = scratch.nearest[: 2 * pairs]
        radius = scratch.radius[:pairs]
        angle = scratch.angle[:pairs]
    else:
        used = words.to(rest.device)
        values, nearest = torch.empty(2, 2 * pairs, device=rest.device)
        radius, angle = torch.empty(2, pairs, device=rest.device)
    fast_pairs(used, values, scale, radius, angle)
    values[:count].add_(rest)
    torch.round(values, out=nearest)
    distance = values.sub_(nearest).abs_()
    distance.view(2, pairs).add_(radius, alpha=FAST_ERROR)
    unsure = _places(distance, 0.5 - REST_ERROR)
    if radius.amax() >= LARGEST_RADIUS * scale:
        far = _places(radius, LARGEST_RADIUS * scale)
        unsure = torch.cat([unsure, far, far + pairs])
    key = drawn[:KEY_WORDS].numpy().tobytes()
    for index in unsure[unsure < count].tolist():
        nearest[index] = _looked_at_again(words.numpy(), index, float(rest[index]), scale, key)
    return nearest[:count]


def _places(values: Tensor, least: float) -> Tensor:
    """The indices of the values from `least` on. NumPy compares in a fifth of PyTorch's time."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(values.numpy() >= np.float32(least)))
    return (values >= least).nonzero().flatten()


def _looked_at_again(words: Words, index: int, rest: float, scale: float, key: bytes) -> int:
    """The rounded value at an index, from more bits of its uniforms: as `grid.first_normal` in
    float64 and, where that can't tell, as `grid.second_normal`."""
    pairs = 2 * len(words) // 3  # a word for each radius, and half of one for each angle
    half, pair = divmod(index, pairs)
    own = key + pair.to_bytes(8, "big")
    word = int(words[pair])
    more = int.from_bytes(shake_256(own + b"angle").digest(4), "big")
    turn = (int(words[pairs:].view(np.int32)[pair]) << 32) + more
    bits = word & LOW_63_BITS
    angle = turn * (math.pi * 2.0**-63)
    radius = math.sqrt(-2 * math.log((bits + 0.5) * 2.0**-63))
    value = scale * radius * (math.sin(angle) if half else math.cos(angle)) + rest
    near_end = abs(bits - 2**62) > 2**62 - FEW_BITS
    if not near_end and abs(value - round(value)) < 0.5 - (2 * scale * ERROR + 2.0**-52):
        return round(value)
    with localcontext(prec=140):
        exact = Decimal(scale) * second_normal(torch.tensor([word, turn]), half, own)
        return math.floor(exact + Decimal(rest) + Decimal("0.5"))
