"""The public integer grid: exact sums, and noise rounded to it, so that floating point leaks
nothing.

Mironov (2012, "On significance of the least significant bits for differential privacy") showed that
the low bits of a noised floating-point number tell which sums can have produced it. Here every
update is truncated to multiples of a public step, the sum is exact in int64, and the noise added to
it is a Gaussian rounded to the same multiples. For an integer sum s and a real Gaussian X, s +
round(X) = round(s + X): the release is the exact Gaussian mechanism followed by a rounding, so its
accounting holds unchanged, sampling included. `grid_slack` bounds the remaining error, the chance
that a drawn value is not the rounding of an exact Gaussian. The same holds for Laplace noise.

A draw comes from one or two uniforms of 127 bits, and is first computed in float64 from 63 bits of
each. If the floating-point error could reach a rounding boundary, about once in a million draws,
the other bits are made and the value is computed again in decimal arithmetic of 140 digits. So a
draw is a function of the bits alone, the same on every machine. The first computation relies on
PyTorch's float64 log, sqrt, sin and cos being right to 4 units in the last place; a test compares
them with mpmath. The time of a draw is not constant: the second computation takes a third of a
millisecond.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, localcontext
from hashlib import shake_256

import torch
from torch import Tensor

from discreet.privacy.randomness import (
    CHUNK,
    FEW_BITS,
    LOW_63_BITS,
    RandomSource,
    box_muller,
    laplace_values,
    signed,
)

# least number of steps in C / sqrt(num_params): truncation moves an update by less than C / 1000
FINENESS = 2**10
LARGEST_CLIP = 2**26  # in steps: a float64 sum of squares is exact up to 2^53
# of noise, in steps: up to here at most about one draw in 1000 is computed again in decimals
LARGEST_SCALE = 2.0**32
LARGEST_TOTAL = 2.0**62  # in steps: half of what int64 holds
BITS = 127  # of each uniform behind a draw
ERROR = 2.0**-43  # bound on the error of the float64 value, for scale 1
# Maps words to values with an error of at most ERROR, and a mask of those whose error may be more.
_FirstLook = Callable[[Tensor], tuple[Tensor, Tensor]]
# Maps words, an index and a key for more bits to the value at that index.
_SecondLook = Callable[[Tensor, int, bytes], Decimal]
Law = tuple[_FirstLook, _SecondLook]
_PI = Decimal(
    "3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706798"
)


@dataclass(frozen=True)
class Grid:
    """The multiples of `step`, a power of two, so that dividing and multiplying by it is exact in
    float."""

    step: float

    def __post_init__(self) -> None:
        if not 2.0**-1000 <= self.step <= 2.0**1000 or math.frexp(self.step)[0] != 0.5:
            raise ValueError(f"step must be a power of two in [2^-1000, 2^1000], not {self.step}")

    def gaussian(self, count: int, stddev: float, source: RandomSource) -> Tensor:
        """`count` Gaussians of `stddev` (in the units of the data, at most 2^32 steps) rounded to
        steps: int64, (count,).

        Each is the correct rounding of a Gaussian made from two 127-bit uniforms. A stddev of 0
        gives zeros.
        """
        return _rounded(count, stddev / self.step, source, law=NORMAL)

    def laplace(self, count: int, scale: float, source: RandomSource) -> Tensor:
        """`count` Laplace values of `scale` (in the units of the data): otherwise as `gaussian`."""
        return _rounded(count, scale / self.step, source, law=LAPLACE)

    def to_float(self, steps: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Whole steps in the units of the data: exact up to 2^53 steps, then rounded once to
        `dtype`."""
        return (steps.double() * self.step).to(dtype)


def grid_for(
    clip_norm: float, num_params: int, *, largest_cohort: int = 2**20, noise_scale: float = 0.0
) -> Grid:
    """The grid for updates (num_params,) of norm at most `clip_norm`, from public values alone.

    The step is the largest power of two that is at most clip_norm / (1024 * sqrt(num_params)):
    truncation moves an update by less than clip_norm / 1024 in L2. If noise of `noise_scale` (its
    standard deviation or scale) would be more than 2^31 steps, the steps are made larger: the
    truncation error is then far below the noise. Raises ValueError: the sum of `largest_cohort`
    updates and the largest noise could overflow int64.

    >>> grid_for(1.0, 10_000).step == 2.0**-17
    True
    """
    step = math.ldexp(0.5, math.frexp(clip_norm / (FINENESS * math.sqrt(num_params)))[1])
    grid = Grid(
        max(
            step,
            math.ldexp(1.0, math.frexp(2 * noise_scale / LARGEST_SCALE)[1])
            if noise_scale
            else step,
        )
    )
    if largest_cohort * (clip_norm / grid.step) + 128 * LARGEST_SCALE > LARGEST_TOTAL:
        raise ValueError(
            f"largest_cohort={largest_cohort} updates of {num_params} params could overflow int64"
        )
    return grid


def check_finite(total: Tensor) -> None:
    """Raises ValueError: a value is not finite."""
    # A value that is not finite makes the sum so, and the sum is fifty times faster than a look at
    # each value. As a sum may also overflow, each value is looked at then.
    if not math.isfinite(total.sum()) and not torch.isfinite(total).all():
        raise ValueError("total must be finite")


def grid_slack(num_params: int, stddev_in_steps: float, *, bits: int = BITS) -> float:
    """Bound on the total variation distance between `Grid.gaussian` and exact Gaussians, rounded: 0
    without noise.

    Let S be stddev_in_steps. A value is round(S * R * cos(2 pi t)), or with sin, where R = sqrt(-2
    ln u). An exact Gaussian has u and t uniform; the one drawn replaces them by the midpoint of
    their cell, one of 2^bits * 2^bits equal cells (t has one bit more than that). Both round to the
    same integer unless a rounding boundary R * cos(2 pi t) = c, with c = (k + 1/2) / S for an
    integer k, cuts the cell. Count those cells:

    - The column u < 2^-bits: all of its 2^bits cells. A boundary that leaves this column has |c| <=
      R_max = sqrt(2 bits ln 2), and there are at most 2 S R_max + 1 of those.
    - On such a boundary u = exp(-c^2 / (2 cos^2(2 pi t))), monotone in t over each of two quarter
      turns, and the boundary has no point over the other two. A monotone curve cuts at most 2 *
      2^bits cells.

    Together these are at most 2^bits * (8 S R_max + 5) of 4^bits cells. Decimal arithmetic moves
    the boundaries by less than 10^-90, far less than a cell; the bound is doubled to allow for
    that. A union bound over the coordinates gives num_params * 2 * (8 S R_max + 5) / 2^bits:
    1.3e-24 for a million coordinates and S = 2^20. AES-256 in counter mode is taken as random."""
    largest_radius = math.sqrt(2 * bits * math.log(2))
    return _slack(
        num_params, stddev_in_steps, cuts=8 * stddev_in_steps * largest_radius + 5, bits=bits
    )


def laplace_grid_slack(num_params: int, scale_in_steps: float, *, bits: int = BITS) -> float:
    """As `grid_slack`, for `Grid.laplace`: num_params * 2 * (S bits ln 2 + 2) / 2^bits.

    A value is round(S * -ln u) with a sign. For each sign a boundary -ln u = (k + 1/2) / S cuts one
    cell. The cell u < 2^-bits counts as cut; outside it there are at most S bits ln 2 + 1
    boundaries.
    """
    return _slack(
        num_params, scale_in_steps, cuts=scale_in_steps * bits * math.log(2) + 2, bits=bits
    )


def _slack(num_params: int, scale_in_steps: float, *, cuts: float, bits: int) -> float:
    if scale_in_steps == 0:
        return 0.0
    return min(1.0, num_params * 2 * cuts * 2.0**-bits)


def _rounded(count: int, scale: float, source: RandomSource, *, law: Law) -> Tensor:
    if not 0 <= scale <= LARGEST_SCALE:
        raise ValueError(f"noise must be in [0, 2^32] steps, not {scale}")
    noise = torch.zeros(count, dtype=torch.int64)
    if scale == 0:
        return noise
    key = source.words(4).tobytes()
    for start in range(0, count, CHUNK):
        part = noise[start : start + CHUNK]
        words = signed(source.words(len(part) + len(part) % 2))
        nearest = nearest_steps(words, scale, key + start.to_bytes(8, "big"), law=law)
        part.copy_(nearest[: len(part)])
    return noise


def nearest_steps(
    words: Tensor,
    scale: float,
    key: bytes,
    *,
    law: Law,
    offset: Tensor | None = None,
) -> Tensor:
    """The values of words, int64 (n,), times `scale`, plus an `offset` (n,), float64 in [-1/2, 1/2]
    and in steps, correctly rounded to whole steps: float64, (n,).

    A float64 value with an offset has twice the error of one without.
    """
    first, second = law
    values, near_end = first(words)
    values.mul_(scale)
    error = scale * ERROR
    if offset is not None:
        values.add_(offset)
        error = 2 * error + 2.0**-52
    nearest = values.round()
    unsure = (values.sub_(nearest).abs_() >= 0.5 - error).logical_or_(near_end)
    for index in unsure.nonzero().flatten().tolist():
        with localcontext(prec=140):
            value = Decimal(scale) * second(words, index, key)
            if offset is not None:
                value += Decimal(float(offset[index]))
            nearest[index] = math.floor(value + Decimal("0.5"))
    return nearest


def first_normal(words: Tensor) -> tuple[Tensor, Tensor]:
    """Standard normal values from as many int64 words, (2m,), float64, each with an error of at
    most 2^-43.9, and a mask of those whose radius word is too near an end for that bound. Words 0
    .. m-1 give the radii and words m .. 2m-1 the angles of `box_muller`. The first m values come
    from cosines and the last m from sines.

    For a radius uniform u in [2^-20, 1 - 2^-20], so that R = sqrt(-2 ln u) is in [2^-9.5, 5.3]: the
    float u is right to 2^-54 + 2^-63, which moves R by (2^-54 + 2^-63) / (u R), at most 2^-44.5 (at
    the large end; 2^-46.4 at the small end). The angle is right to 2^-49.7. That, 4 ulp in each
    function and half an ulp in each product add 5.3 * 2^-48.2. The product with the scale adds no
    more than 5.3 * 2^-53.
    """
    half = len(words) // 2
    values = torch.empty(2 * half, dtype=torch.float64)
    bits = words[:half] & LOW_63_BITS
    box_muller(bits.double(), values[half:].copy_(words[half:]), values[:half])
    near_end = (bits - 2**62).abs_() > 2**62 - FEW_BITS
    return values, near_end.repeat(2)


def second_normal(words: Tensor, index: int, key: bytes) -> Decimal:
    """R * cos(angle), or sin, for u = (127 bits + 1/2) / 2^127 and angle = 2 pi (128 bits + 1/2) /
    2^128."""
    half = len(words) // 2
    pair = index % half
    for_radius, for_angle = _more_bits(key, pair)
    angle = _PI * (2 * ((int(words[half + pair]) << 64) + for_angle) + 1) / 2**128
    radius = (2 * _exponential(int(words[pair]), for_radius)).sqrt()
    return radius * _cosine(angle - _PI / 2 if index >= half else angle)


def first_laplace(words: Tensor) -> tuple[Tensor, Tensor]:
    """-ln u or ln u by the sign bit, each with an error of at most 2^-43.7, and a mask of those
    with u < 2^-20, too near 0 for that bound.

    The float u is right to 2^-53 u + 2^-64, which moves ln u by 2^-44 + 2^-53 at most; 4 ulp in log
    add 2^-47, and the product with the scale no more than 14 * 2^-53.
    """
    return laplace_values(words), (words & LOW_63_BITS) < FEW_BITS


def second_laplace(words: Tensor, index: int, key: bytes) -> Decimal:
    word = int(words[index])
    return _exponential(word, _more_bits(key, index)[0]).copy_sign(word)


NORMAL: Law = (first_normal, second_normal)
LAPLACE: Law = (first_laplace, second_laplace)


def _more_bits(key: bytes, index: int) -> tuple[int, int]:
    """64 more bits for each of the two uniforms at an index, from SHAKE-256 of a secret key."""
    more = shake_256(key + index.to_bytes(8, "big")).digest(16)
    return int.from_bytes(more[:8], "big"), int.from_bytes(more[8:], "big")


def _exponential(word: int, more: int) -> Decimal:
    """-ln u for u = (127 bits + 1/2) / 2^127. The 128 digits of u fit the precision, so that u is
    exact."""
    bits = (word & LOW_63_BITS) << 64 | more
    return -(Decimal(2 * bits + 1) / 2**128).ln()


def _cosine(angle: Decimal) -> Decimal:
    """cos by its power series, for |angle| < 5."""
    square = angle * angle
    term = Decimal(1)
    total = Decimal(0)
    degree = 0
    while abs(term) > Decimal("1e-130"):
        total += term
        degree += 2
        term *= -square / (degree * (degree - 1))
    return total
