"""Epsilon of two Gaussians that somebody has to tell apart, exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from dp_accounting import get_sigma_gaussian
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr

MOST_EPSILON = 1e6  # beyond it an epsilon means nothing, and searches end


@dataclass(frozen=True)
class Normal:
    """A Gaussian on the line; `spread` is its standard deviation, above 0."""

    mean: float
    spread: float


@lru_cache(maxsize=4096)
def epsilon_of_shift(shift: float, *, delta: float) -> float:
    """Epsilon at `delta` of N(shift, 1) against N(0, 1), both ways; 0 for a shift at or below 0.

    A Gaussian mechanism with noise multiplier z, without sampling, has the shift 1 / z.

    Source: Balle, Wang 2018 (arXiv 1805.06530), Theorem 8; Dong, Roth, Su 2022 (arXiv 1905.02383), Corollary 2.13.

    >>> round(epsilon_of_shift(1.0, delta=1e-3), 3)
    3.139
    """
    return epsilon_of_normals(Normal(shift, 1.0), Normal(0.0, 1.0), delta=delta) if shift > 0 else 0.0


@lru_cache(maxsize=4096)
def shift_of_epsilon(epsilon: float, *, delta: float) -> float:
    """The shift whose epsilon at `delta` is this one: the inverse of `epsilon_of_shift`.

    >>> round(shift_of_epsilon(3.1387, delta=1e-3), 4)
    1.0
    """
    return float(1 / get_sigma_gaussian(epsilon, delta))


def epsilon_of_normals(one: Normal, other: Normal, *, delta: float) -> float:
    """The least epsilon at `delta` for which neither Gaussian gives any set more than e^epsilon times the other's
    probability plus delta; exact also if their spreads differ.

    Source: Steinke 2022 (arXiv 2210.00597), Proposition 7, as in Andrew et al. 2023 (arXiv 2302.03098), Section 3.

    >>> round(epsilon_of_normals(Normal(1.0, 1.0), Normal(0.0, 1.0), delta=1e-2), 4)
    2.3178
    """

    def excess(epsilon: float) -> float:
        return max(delta_of_normals(one, other, epsilon), delta_of_normals(other, one, epsilon)) - delta

    if excess(0.0) <= 0:
        return 0.0
    most = 1.0
    while excess(most) > 0:
        if most > MOST_EPSILON:
            return math.inf
        most *= 2
    return float(brentq(excess, 0.0, most, xtol=1e-10))


def delta_of_normals(one: Normal, other: Normal, epsilon: float) -> float:
    """The most that P(S) - e^epsilon Q(S) can be over all sets S, with P of `one` and Q of `other`.

    That set is where the log of the ratio of densities, a polynomial a x^2 + b x + c of degree two, passes epsilon.
    """
    square = 0.5 * (other.spread**-2 - one.spread**-2)
    linear = one.mean / one.spread**2 - other.mean / other.spread**2
    constant = 0.5 * ((other.mean / other.spread) ** 2 - (one.mean / one.spread) ** 2)
    constant += math.log(other.spread / one.spread) - epsilon
    if abs(square) * one.spread**2 < 1e-12:
        if linear == 0:
            return 0.0
        edge = -constant / linear
        return _gain(one, other, epsilon, (edge, math.inf) if linear > 0 else (-math.inf, edge))
    root = linear**2 - 4 * square * constant
    if root <= 0:
        return 0.0  # the ratio never passes e^epsilon: it can't everywhere, for both are probabilities
    # The stable form of the two roots: no difference of nearly equal numbers.
    half = -0.5 * (linear + math.copysign(math.sqrt(root), linear))
    low, high = sorted((half / square, constant / half))
    if square < 0:
        return _gain(one, other, epsilon, (low, high))
    return _gain(one, other, epsilon, (-math.inf, low)) + _gain(one, other, epsilon, (high, math.inf))


def _gain(one: Normal, other: Normal, epsilon: float, between: tuple[float, float]) -> float:
    """P(between) - e^epsilon Q(between)."""
    return _mass(one, between, 0.0) - _mass(other, between, epsilon)


def _mass(normal: Normal, between: tuple[float, float], log_factor: float) -> float:
    """exp(log_factor) times the probability of an interval, also if the factor alone would overflow."""
    low, high = ((edge - normal.mean) / normal.spread for edge in between)
    if low > 0:  # the mirrored interval has the same mass, and tails keep their digits below 0
        low, high = -high, -low
    if log_factor == 0.0:
        return float(ndtr(high) - ndtr(low))
    above, below = float(log_ndtr(high)), float(log_ndtr(low))
    return math.exp(log_factor + above) * -math.expm1(below - above) if above > -math.inf else 0.0
