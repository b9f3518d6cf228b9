"""Sums in floating point and their noise, rounded together, so that the noise has no low bits.

A float sum s is released as round(s + X), in multiples of a public step: a power of two, far below
the noise. It is made as k + round(r + X) from the nearest multiple k and the rest r, which are both
exact. So the release is the exact mechanism on s and then a rounding, whatever s is: its accounting
holds unchanged. `discreet.privacy.grid` has the same for sums that are exact themselves; what is
said there of attacks, of time and of PyTorch's functions holds here.

A Gaussian value comes from uniforms of 127 and 128 bits. It is first computed from 63 and 32 of
them in float32. If the error of that could reach a rounding boundary, about once in 2,000 draws,
the value is computed again in float64 and, where that can't tell either, from more bits as the
grid's values are.
`grid_slack` for LARGEST_SCALE bounds the remaining error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from hashlib import shake_256
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from discreet.privacy.grid import (
    LAPLACE,
    check_finite,
    grid_slack,
    laplace_grid_slack,
    nearest_steps,
    second_normal,
)
from discreet.privacy.randomness import (
    CHUNK,
    GPU_PAIRS,
    LOW_63_BITS,
    PAIRS,
    Bits,
    Floats,
    RandomSource,
    fast_pairs,
    scratch,
    signed,
    write_pairs,
)

Places = npt.NDArray[np.intp]
Noised = Callable[[Floats], Floats]
FINENESS = 16  # least noise, in steps: rounding adds at most 0.04 % to its variance
LARGEST_SCALE = 2.0 * FINENESS
FINE = 2**20  # the same for Laplace noise, which is computed in float64 anyway
# Bound on the error of a normal value in float32 of a radius between NEAR and FAR, in units of
# 2^-24: for the radius r, 2 / r from rounding u and 5.5 r from logarithm and root, 9.5 r for the
# angle, 4 r for cosine or sine, and r each for their product and for a sum: 128.4
# at NEAR and 126.4 at FAR.
FAST_ERROR = 130 * 2.0**-24
# A smaller radius than NEAR (chance 2^-13) or one from FAR on (chance 2^-26) is computed again.
NEAR = 2.0**-6
FAR = 6.0
REST_ERROR = 2.0**-23  # what adding a rest to that may err, in steps
# The same of a value in float64, whose angle has 32 bits: 0.8 of this for the angle, the rest for
# all else. A radius near 0 follows from 1 - u, which is right to 2^-53.
SECOND_ERROR = 2.0**-30
FEW_BITS = 2**30  # a word below this (chance 2^-33) has too few bits for its logarithm
KEY_WORDS = 4
HALF_STEP = math.pi * 2.0**-31  # the angle of a half of a word
SHORT_UNIFORM = np.float32(2.0**-63)
SHORT_HALF = np.float32(2.0**-64)
# Added to angles, (2, 1): half a step, and a quarter turn whose sine is the cosine.
AS_SINES = np.array([[HALF_STEP / 2 + math.pi / 2], [HALF_STEP / 2]])


class Unsure(NamedTuple):
    """The k pairs of a piece that are computed again, as one of their values must be.

    Attributes:
        pair: their indices, (k,).
        words, halves: the words of their radii and the halves of words of their angles, (k,).
        rest: what is added to their values, in steps, (2, k): to those from cosines, then to those
            from sines.
    """

    pair: Places
    words: Bits
    halves: npt.NDArray[np.int32]
    rest: Floats


def step_for(scale: float, fineness: int = FINENESS) -> float:
    """The largest power of two that is at most `scale` > 0, of the noise, over `fineness`.

    >>> step_for(1.0) == 2.0**-4
    True
    """
    return math.ldexp(0.5, math.frexp(scale / fineness)[1])


def rounded_gaussian(
    total: Tensor, stddev: float, source: RandomSource, *, in_place: bool = False
) -> Tensor:
    """`total`, float32 or float64 of any shape, plus Gaussians of `stddev` > 0, in whole multiples
    of `step_for(stddev)`: of the same shape, type and device. With `in_place` it may take the place
    of `total`: new memory for a large sum takes a third as long as its noise.

    Raises ValueError: `total` is not finite in steps.
    """
    step = step_for(stddev)
    if total.device.type != "cpu":
        return _released_on_device(total, step, stddev / step, source, in_place=in_place)

    def noised(rest: Floats) -> Floats:
        return _gaussian_steps(rest, stddev / step, source)

    return _released(total, step, noised, 2 * PAIRS, in_place=in_place)


def rounded_laplace(total: Tensor, scale: float, source: RandomSource) -> Tensor:
    """As `rounded_gaussian`, for Laplace noise of `scale` and `step_for(scale, FINE)`. It is made
    on the CPU."""
    step = step_for(scale, FINE)

    def noised(rest: Floats) -> Floats:
        words = signed(source.words(len(rest)))
        key = source.words(KEY_WORDS).tobytes()
        offset = torch.from_numpy(rest).double()
        if not np.isfinite(rest).all():
            check_finite(offset)
        return nearest_steps(words, scale / step, key, law=LAPLACE, offset=offset).numpy()

    return _released(total.cpu(), step, noised, CHUNK).to(total.device)


def _released(
    total: Tensor, step: float, noised: Noised, at_once: int, *, in_place: bool = False
) -> Tensor:
    """The total in multiples of `step`, of which `noised` rounds the rests with their noise, and
    raises ValueError for those that are NaN. NumPy does this, since its functions take half of
    PyTorch's time."""
    values = total.detach().numpy().reshape(-1)
    released = values if in_place else np.empty_like(values)
    scratch.reserve((min(at_once, len(values)) + 1) // 2)
    is_short = values.dtype == np.float32
    wholes = scratch.wholes if is_short else np.empty_like(values[:at_once])
    for start in range(0, len(values), at_once):
        part = released[start : start + at_once]
        with np.errstate(invalid="ignore", over="ignore"):
            # a power of two, so this is exact
            np.divide(values[start : start + at_once], step, out=part)
            whole = np.rint(part, out=wholes[: len(part)])
            part -= whole  # NaN where the total is not finite in steps
        # The exact sum is rounded to the type of the total once: what leaves follows from it alone.
        np.add(whole, noised(part), out=part)
        part *= step
    return torch.from_numpy(released).reshape(total.shape)


def _released_on_device(
    total: Tensor, step: float, scale: float, source: RandomSource, *, in_place: bool = False
) -> Tensor:
    """The same for Gaussians, computed on the device of the total: only what is looked at again is
    on the CPU."""
    steps = total.detach().reshape(-1)
    steps = steps.div_(step) if in_place else steps / step
    check_finite(steps)
    for part in torch.split(steps, 2 * GPU_PAIRS):
        pairs = (len(part) + 1) // 2
        key = source.words(KEY_WORDS).tobytes()
        words = source.words_on(total.device, pairs + (pairs + 1) // 2)
        whole = part.round()
        rest = part.new_zeros(2 * pairs)
        torch.sub(part, whole, out=rest[: len(part)])
        drawn = torch.empty(2 * pairs, device=total.device)
        radius, angle = torch.empty(2, pairs, device=total.device)
        fast_pairs(words.clone(), drawn, scale, radius, angle)
        nearest = drawn.add_(rest).round()
        furthest = drawn.sub_(nearest).abs_().view(2, pairs).amax(0)
        is_sure = furthest < 0.5 - REST_ERROR - scale * FAST_ERROR
        is_sure &= (radius >= NEAR * scale).logical_and_(radius < FAR * scale)
        pair = is_sure.logical_not_().nonzero().flatten()
        unsure = Unsure(
            pair.cpu().numpy(),
            words[pair].cpu().numpy(),
            words[pairs:].view(torch.int32)[pair].cpu().numpy(),
            rest.view(2, pairs)[:, pair].double().cpu().numpy(),
        )
        again = torch.from_numpy(_looked_at_again(unsure, scale, key))
        nearest.view(2, pairs)[:, pair] = again.to(nearest)
        torch.add(whole, nearest[: len(part)], out=part)
    return steps.mul_(step).reshape(total.shape)


def gaussian_slack(count: int) -> float:
    """Bound on the total variation distance of `count` values of `rounded_gaussian` from exact
    ones, rounded."""
    return grid_slack(count, LARGEST_SCALE)


def laplace_slack(count: int) -> float:
    """The same for `rounded_laplace`."""
    return laplace_grid_slack(count, 2.0 * FINE)


def _gaussian_steps(rest: Floats, scale: float, source: RandomSource) -> Floats:
    """Gaussians of `scale` steps plus a rest (n,) in [-1/2, 1/2], rounded: float32, (n,), which the
    next call overwrites. Raises ValueError: a rest is NaN."""
    count = len(rest)
    pairs = (count + 1) // 2
    scratch.reserve(pairs)
    drawn = scratch.bits[: KEY_WORDS + pairs + (pairs + 1) // 2]
    source.fill(drawn)
    words = drawn[KEY_WORDS:]
    radius = _radii(words[:pairs], scale)
    distance = scratch.normals[: 2 * pairs]
    write_pairs(radius, words[pairs:], distance)
    distance[:count] += rest
    nearest: Floats = np.rint(distance, out=scratch.rounded[: 2 * pairs])
    distance -= nearest
    np.abs(distance, out=distance)
    furthest = np.maximum(distance[:pairs], distance[pairs:], out=distance[:pairs])
    # False for NaN, so that only those that are looked at again need the check
    is_sure = furthest < np.float32(0.5 - REST_ERROR - scale * FAST_ERROR)
    is_sure &= radius >= NEAR * scale
    if np.maximum.reduce(radius) >= FAR * scale:
        is_sure &= radius < FAR * scale
    pair = np.flatnonzero(np.logical_not(is_sure, out=is_sure))
    if len(pair):
        halves = words[pairs:].view(np.int32)
        # The last sine may be left over: what it is added to does not matter.
        rests = rest.take(np.concatenate([pair, pair + pairs]), mode="clip").reshape(2, -1)
        if not math.isfinite(rests.sum()):
            check_finite(torch.from_numpy(rests))
        unsure = Unsure(pair, words[pair], halves[pair], rests)
        again = _looked_at_again(unsure, scale, drawn[:KEY_WORDS].tobytes())
        nearest.reshape(2, pairs)[:, pair] = again
    return nearest[:count]


def _radii(words: Bits, scale: float) -> Floats:
    """`randomness.radii`, all in float32."""
    radius: Floats = scratch.radii[: len(words)]
    np.bitwise_and(words, LOW_63_BITS, out=words)
    np.copyto(radius, words, casting="same_kind")
    radius *= SHORT_UNIFORM
    radius += SHORT_HALF
    np.log(radius, out=radius)
    radius *= np.float32(-2 * scale * scale)
    return np.sqrt(radius, out=radius)


def _looked_at_again(unsure: Unsure, scale: float, key: bytes) -> Floats:
    """The rounded values, (2, k), in float64 and, where that can't tell, in decimals."""
    bits = unsure.words & LOW_63_BITS
    radius = np.sqrt(np.log((bits + 0.5) * 2.0**-63) * (-2 * scale * scale))
    value = np.sin(unsure.halves * HALF_STEP + AS_SINES)
    value *= radius
    value += unsure.rest
    nearest: Floats = np.rint(value)
    value -= nearest
    error = radius * SECOND_ERROR + scale * scale * 2.0**-53 / radius
    still = (np.abs(value, out=value) + error >= 0.5) | (bits < FEW_BITS)
    for at in zip(*np.nonzero(still), strict=True):
        nearest[at] = _exact_step(unsure, at, scale, key)
    return nearest


def _exact_step(unsure: Unsure, at: tuple[np.intp, ...], scale: float, key: bytes) -> int:
    """The rounded value of a pair, from more bits of its uniforms, as `grid.second_normal`. `at`: 0
    for the cosine or 1 for the sine, and the place of the pair."""
    is_sine, place = at
    own = key + int(unsure.pair[place]).to_bytes(8, "big")
    more = int.from_bytes(shake_256(own + b"angle").digest(4), "big")
    words = torch.tensor([int(unsure.words[place]), (int(unsure.halves[place]) << 32) + more])
    with localcontext(prec=140):
        normal = second_normal(words, int(is_sine), own)
        rest = Decimal(float(unsure.rest[at]))
        return math.floor(Decimal(scale) * normal + rest + Decimal("0.5"))
