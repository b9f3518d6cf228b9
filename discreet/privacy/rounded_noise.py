"""Gaussian and Laplace noise rounded to integers, each value the correct rounding of the draw it stands for.

A draw comes from one or two uniforms of 127 bits, of which 63 are looked at first, in float64. Where the
float's error could reach a rounding boundary, about one draw in a million, the other bits are made and the
value is computed again in decimal arithmetic of 140 digits. So what is drawn is a function of the bits alone,
the same on every machine, and the distance to exact noise is a matter of counting (`grid.grid_slack`).

The first look relies on PyTorch's float64 log, sqrt, sin and cos being right to 4 units in the last place; a
test compares them with mpmath. The time a draw takes is not constant: a second look costs a third of a
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

from discreet.privacy.randomness import CHUNK, LOW_63_BITS, RandomSource, box_muller, laplace_values, signed

BITS = 127  # of each uniform behind a draw
ERROR = 2.0**-43  # bound on the error of a first look, for scale 1
LARGEST_SCALE = 2.0**32  # up to here at most about one draw in 1000 needs a second look
_TAIL = 2**43  # a radius word this near to an end of its range (chance 2^-20) gets a second look whatever it says
_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706798")


def rounded_normal(count: int, stddev: float, source: RandomSource) -> Tensor:
    """`count` independent values round(stddev * X) for standard Gaussians X, int64, shape (count,).

    Args:
        count: how many, >= 0.
        stddev: in [0, 2^32]; 0 gives zeros.
        source: gives about one word a value.

    Raises:
        ValueError: if count or stddev is out of range.
    """
    return _rounded(count, stddev, source, law=_NORMAL)


def rounded_laplace(count: int, scale: float, source: RandomSource) -> Tensor:
    """`count` independent values round(scale * Y) for standard Laplace Y: otherwise as `rounded_normal`."""
    return _rounded(count, scale, source, law=_LAPLACE)


@dataclass(frozen=True)
class _Law:
    """How a law is drawn from words.

    Attributes:
        first_look: words to values in float64, off by at most ERROR where they are not said to be unsure.
        second_look: words, an index and a key for more bits to the value at that index, right to 10^-95.
    """

    first_look: Callable[[Tensor], tuple[Tensor, Tensor]]
    second_look: Callable[[Tensor, int, bytes], Decimal]


def _rounded(count: int, scale: float, source: RandomSource, *, law: _Law) -> Tensor:
    if count < 0:
        raise ValueError(f"count must be >= 0, not {count}")
    if not 0 <= scale <= LARGEST_SCALE:
        raise ValueError(f"noise must be in [0, 2^32] steps, not {scale}")
    noise = torch.zeros(count, dtype=torch.int64)
    if scale == 0:
        return noise
    key = source.words(4).tobytes()
    for start in range(0, count, CHUNK):
        part = noise[start : start + CHUNK]
        words = signed(source.words(len(part) + len(part) % 2))
        part.copy_(_rounded_chunk(words, scale, law=law, key=key + start.to_bytes(8, "big"))[: len(part)])
    return noise


def _rounded_chunk(words: Tensor, scale: float, *, law: _Law, key: bytes) -> Tensor:
    """The first look, and the second for what it leaves unsure: (2m,) words to (2m,) integers."""
    values, near_end = law.first_look(words)
    nearest = values.mul_(scale).round()
    unsure = (values.sub_(nearest).abs_() >= 0.5 - scale * ERROR).logical_or_(near_end)
    rounded = nearest.long()
    for index in unsure.nonzero().flatten().tolist():
        with localcontext(prec=140):
            rounded[index] = math.floor(Decimal(scale) * law.second_look(words, index, key) + Decimal("0.5"))
    return rounded


def _first_normal(words: Tensor) -> tuple[Tensor, Tensor]:
    """Box and Muller's values, each off by at most 2^-43.9, and which have a radius word too near an end for that.

    For a radius uniform u in [2^-20, 1 - 2^-20], so that R = sqrt(-2 ln u) is in [2^-9.5, 5.3]: the float u
    is right to 2^-54 + 2^-63, which moves R by (2^-54 + 2^-63) / (u R), at most 2^-44.5 (at the large end;
    2^-46.4 at the small end). The angle is right to 2^-49.7. That, 4 ulp in each function and half an ulp in
    each product add 5.3 * 2^-48.2. The product with the scale adds no more than 5.3 * 2^-53.
    """
    half = len(words) // 2
    near_end = ((words[:half] & LOW_63_BITS) - 2**62).abs_() > 2**62 - _TAIL
    return box_muller(words), near_end.repeat(2)


def _second_normal(words: Tensor, index: int, key: bytes) -> Decimal:
    """R * cos(angle), or sin, for u = (127 bits + 1/2) / 2^127 and angle = 2 pi (128 bits + 1/2) / 2^128."""
    half = len(words) // 2
    pair = index % half
    for_radius, for_angle = _more_bits(key, pair)
    angle = _PI * (2 * ((int(words[half + pair]) << 64) + for_angle) + 1) / 2**128
    radius = (2 * _exponential(int(words[pair]), for_radius)).sqrt()
    return radius * _cosine(angle - _PI / 2 if index >= half else angle)


def _first_laplace(words: Tensor) -> tuple[Tensor, Tensor]:
    """-ln u or ln u by the sign bit, each off by at most 2^-43.7, and which have u < 2^-20, too near 0 for that.

    The float u is right to 2^-53 u + 2^-64, which moves ln u by 2^-44 + 2^-53 at most; 4 ulp in log add 2^-47,
    and the product with the scale no more than 14 * 2^-53.
    """
    return laplace_values(words), (words & LOW_63_BITS) < _TAIL


def _second_laplace(words: Tensor, index: int, key: bytes) -> Decimal:
    word = int(words[index])
    return _exponential(word, _more_bits(key, index)[0]).copy_sign(Decimal(word))


def _more_bits(key: bytes, index: int) -> tuple[int, int]:
    """64 more bits for each of the two uniforms at an index, from SHAKE-256 of a secret key."""
    more = shake_256(key + index.to_bytes(8, "big")).digest(16)
    return int.from_bytes(more[:8], "big"), int.from_bytes(more[8:], "big")


def _exponential(word: int, more: int) -> Decimal:
    """-ln u for u = (127 bits + 1/2) / 2^127; the 128 digits of u fit the precision, so that u is exact."""
    bits = (word & LOW_63_BITS) << 64 | more
    return -(Decimal(2 * bits + 1) / 2**128).ln()


def _cosine(angle: Decimal) -> Decimal:
    """cos by its power series, for |angle| < 5."""
    square, term, total, degree = angle * angle, Decimal(1), Decimal(0), 0
    while abs(term) > Decimal("1e-130"):
        total += term
        degree += 2
        term *= -square / (degree * (degree - 1))
    return total


_NORMAL = _Law(_first_normal, _second_normal)
_LAPLACE = _Law(_first_laplace, _second_laplace)
