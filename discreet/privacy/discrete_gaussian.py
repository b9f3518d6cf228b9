"""The discrete Gaussian, sampled exactly in integer arithmetic: slow, and what faster noise is compared with
in tests.

Canonne, Kamath and Steinke (2020), "The Discrete Gaussian for Differential Privacy", Algorithms 1 to 3. No
floating point takes part, so that the law is exact if the source's words are random.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from discreet.privacy.randomness import RandomSource


def discrete_gaussian(count: int, *, variance: Fraction, source: RandomSource) -> Tensor:
    """`count` independent integers x with chance proportional to exp(-x^2 / (2 * variance)): int64, shape
    (count,).

    Added to an integer vector whose L2 norm changes by at most D between neighbours, one to each coordinate, they
    give (D^2 / (2 * variance))-concentrated differential privacy, as a continuous Gaussian of that variance would.

    Raises:
        ValueError: if variance is not > 0.
    """
    if not variance > 0:
        raise ValueError(f"variance must be > 0, not {variance}")
    return torch.tensor([_gaussian(Fraction(variance), source) for _ in range(count)], dtype=torch.int64)


def discrete_laplace(count: int, *, scale: Fraction, source: RandomSource) -> Tensor:
    """`count` independent integers x with chance proportional to exp(-|x| / scale): int64, shape (count,).

    Raises:
        ValueError: if scale is not > 0.
    """
    if not scale > 0:
        raise ValueError(f"scale must be > 0, not {scale}")
    return torch.tensor([_laplace(Fraction(scale), source) for _ in range(count)], dtype=torch.int64)


def _gaussian(variance: Fraction, source: RandomSource) -> int:
    """Algorithm 3: a discrete Laplace of scale floor(stddev) + 1, kept so often that it is Gaussian."""
    scale = math.isqrt(math.floor(variance)) + 1
    while True:
        value = _laplace(Fraction(scale), source)
        if _bernoulli_exp((abs(value) - variance / scale) ** 2 / (2 * variance), source):
            return value


def _laplace(scale: Fraction, source: RandomSource) -> int:
    """Algorithm 2, with scale = numerator / denominator."""
    while True:
        rest = _uniform_below(scale.numerator, source)
        if not _bernoulli_exp(Fraction(rest, scale.numerator), source):
            continue
        whole = 0
        while _bernoulli_exp(Fraction(1), source):
            whole += 1
        size = (rest + scale.numerator * whole) // scale.denominator
        is_negative = _bernoulli(Fraction(1, 2), source)
        if not (is_negative and size == 0):
            return -size if is_negative else size


def _bernoulli_exp(exponent: Fraction, source: RandomSource) -> bool:
    """True with chance exp(-exponent), exponent >= 0 (Algorithm 1)."""
    while exponent > 1:
        if not _bernoulli_exp(Fraction(1), source):
            return False
        exponent -= 1
    tries = 1
    while _bernoulli(exponent / tries, source):
        tries += 1
    return tries % 2 == 1


def _bernoulli(probability: Fraction, source: RandomSource) -> bool:
    return _uniform_below(probability.denominator, source) < probability.numerator


def _uniform_below(limit: int, source: RandomSource) -> int:
    """Uniform over 0 .. limit - 1, by rejection."""
    bits = (limit - 1).bit_length()
    while True:
        value = int.from_bytes(source.words(-(-bits // 64)).tobytes(), "little") & ((1 << bits) - 1)
        if value < limit:
            return value
