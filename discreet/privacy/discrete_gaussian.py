"""Exact draws of the discrete Gaussian N_Z(0, sigma^2), with P(x) proportional to exp(-x^2 / (2
sigma^2)).

The method is rejection from the discrete Laplace distribution (Canonne, Kamath and Steinke 2020,
"The Discrete Gaussian for Differential Privacy", Algorithm 3). Both of its decisions are made from
uniforms with as many bits as the decision needs:

- Let t = floor(sigma) + 1, and u uniform. G = floor(-t ln u) has P(G >= m) = exp(-m / t), exactly.
  With a fair sign, and without a negative zero, this is the discrete Laplace distribution of scale
  t.
- G is kept if -ln v >= x for another uniform v, where x = (G - sigma^2 / t)^2 / (2 sigma^2): with
  probability exp(-x).

A decision is first tried in float64 with 63 bits of the uniform. It stands only if, by the proven
bound on the floating-point error, no further bits could change it. Otherwise bits are added, 64 at
a time, and the decision is made in decimal arithmetic that brackets the logarithm. So every
decision is that of the real number, the tails are not cut off, and a draw is a function of the bits
alone, the same on every machine. As in `discreet.privacy.grid`, the first try relies on PyTorch's
float64 log being right to 4 units in the last place, and the time of a draw varies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import partial
from hashlib import shake_256

import torch
from torch import Tensor

from discreet.privacy.grid import ERROR
from discreet.privacy.randomness import (
    CHUNK,
    FEW_BITS,
    LOW_63_BITS,
    RandomSource,
    open_uniform,
    signed,
)

LARGEST_VARIANCE = 2**64
KEEP_ERROR = 2.0**-36  # bound on the error of the difference that decides whether a draw is kept
_TRIALS = 1.4  # trials a draw; the mean is 1.32 for a large sigma and lower for a small one


def discrete_gaussian(count: int, variance: int, source: RandomSource) -> Tensor:
    """`count` independent draws of N_Z(0, variance), int64, (count,). The variance is a whole
    number of at most 2^64."""
    if (
        isinstance(variance, bool)
        or not isinstance(variance, int)
        or not 0 <= variance <= LARGEST_VARIANCE
    ):
        raise ValueError(f"variance must be a whole number in [0, 2^64], not {variance!r}")
    drawn = torch.zeros(count, dtype=torch.int64)
    if variance:
        found = 0
    else:
        found = count
    while found < count:
        kept = _trials(min(CHUNK, int(_TRIALS * (count - found)) + 16), variance, source)[
            : count - found
        ]
        drawn[found : found + len(kept)] = kept
        found += len(kept)
    return drawn


def _trials(count: int, variance: int, source: RandomSource) -> Tensor:
    """The draws kept from `count` trials, in order."""
    key = source.words(4).tobytes()
    words = signed(source.words(count))
    others = signed(source.words(count))
    sizes = _sizes(words, math.isqrt(variance) + 1, key + b"size")
    keep = _kept(sizes, others, variance, key + b"keep").logical_and_(
        (sizes > 0).logical_or_(words >= 0)
    )
    signs = words >> 63  # -1 or 0: a number is negated by inverting its bits and adding 1
    return sizes.bitwise_xor_(signs).sub_(signs)[keep]


def _sizes(words: Tensor, scale: int, key: bytes) -> Tensor:
    """floor(-scale * ln u), int64 (n,).

    A first look at -ln u is off by at most ERROR = 2^-43 for u >= 2^-20 (`grid.first_laplace`),
    and the product with a scale of at most 2^32 + 1 rounds by at most 14 * 2^-53 of the scale more.
    """
    values = open_uniform(words).log_().mul_(-float(scale))
    sizes = values.floor()
    above = values.sub_(sizes)
    near_end = (words & LOW_63_BITS) < FEW_BITS
    margin = scale * ERROR * 1.01
    unsure = (above <= margin).logical_or_(above >= 1 - margin).logical_or_(near_end)
    whole = sizes.long()
    for index in unsure.nonzero().flatten().tolist():
        whole[index] = _settled(int(words[index]), _more_bits(key, index), partial(_floor, scale))
    return whole


def _kept(sizes: Tensor, words: Tensor, variance: int, key: bytes) -> Tensor:
    """True where -ln v >= (size - variance / t)^2 / (2 variance), bool (n,).

    For sizes up to 45 t the right side is at most 4050, since t^2 <= 4 variance. In float64 the
    distance is off by at most 46 t * 2^-53, from rounding variance / t and the difference. That
    moves the right side by at most 45 t / variance times as much, 8280 * 2^-53, and four roundings
    by at most 4050 * 2^-53 each: together by less than 2^-38. -ln v is off by 2^-43 for v >= 2^-20.
    Outside these ranges the decision is made again with more bits.
    """
    scale = math.isqrt(variance) + 1
    distance = sizes.double().sub_(variance / scale)
    difference = open_uniform(words).log_().add_(distance.square_().div_(2.0 * variance))
    keep = difference <= 0
    near_end = ((words & LOW_63_BITS) < FEW_BITS).logical_or_(sizes > 45 * scale)
    unsure = (difference.abs_() <= KEEP_ERROR).logical_or_(near_end)
    for index in unsure.nonzero().flatten().tolist():
        least = Fraction((int(sizes[index]) * scale - variance) ** 2, 2 * variance * scale**2)
        keep[index] = _settled(int(words[index]), _more_bits(key, index), partial(_above, least))
    return keep


def _settled(
    word: int, more: Iterator[int], decide: Callable[[Decimal, Decimal], int | None]
) -> int:
    """The first answer of `decide` that is not None, on ever smaller intervals around -ln u. The
    bits of u are the low 63 of `word`, then those of `more`."""
    bits = word & LOW_63_BITS
    length = 63
    while True:
        bits = bits << 64 | next(more)
        length = length + 64
        with localcontext(prec=length + 20):
            if bits:
                found = decide(*_interval(bits, length))
            else:
                found = None
        if found is not None:
            return found


def _interval(bits: int, length: int) -> tuple[Decimal, Decimal]:
    """Bounds on -ln u for u within [bits, bits + 1] / 2^length. The quotient is exact in this
    precision; the logarithm and the products are rounded, with a relative error below 10^-(length +
    10)."""
    rounding = Decimal(10) ** -(length + 10)
    low, high = (-(Decimal(end) / 2**length).ln() for end in (bits + 1, bits))
    return low * (1 - rounding), high * (1 + rounding)


def _floor(scale: int, low: Decimal, high: Decimal) -> int | None:
    first = math.floor(scale * low)
    last = math.floor(scale * high)
    if first == last:
        return first
    return None


def _above(least: Fraction, low: Decimal, high: Decimal) -> bool | None:
    first = Fraction(low) >= least
    last = Fraction(high) >= least
    if first == last:
        return first
    return None


def _more_bits(key: bytes, index: int) -> Iterator[int]:
    """An endless stream of bits for the uniform at an index, 64 at a time, from SHAKE-256 of a
    secret key."""
    block = 0
    while True:
        yield int.from_bytes(
            shake_256(key + index.to_bytes(8, "big") + block.to_bytes(8, "big")).digest(8), "big"
        )
        block += 1
