"""The Gaussian fit: an estimate of epsilon, with its interval, from Gaussians fitted to the scores."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from dp_accounting import get_epsilon_gaussian, get_sigma_gaussian
from numpy.typing import NDArray
from scipy.optimize import approx_fprime, brentq
from scipy.special import ndtr
from scipy.stats import f as f_distribution
from scipy.stats import norm, normaltest

from discreet.audit.canary_scores import Scores

FEWEST = 20  # scores of a kind, below which a fit says nothing
DOUBT = 1e-3  # a test with this false-alarm rate says that spreads differ, or that scores are not Gaussian
STEP = 1e-4  # of numerical derivatives, in units of a spread
MOST_EPSILON = 700.0  # beyond it an epsilon means nothing, and e^epsilon is no number


@lru_cache(maxsize=4096)
def epsilon_of_shift(shift: float, *, delta: float) -> float:
    """Epsilon at `delta` of N(shift, 1) against N(0, 1), both ways; 0 for a shift at or below 0.

    A Gaussian mechanism with noise multiplier z, without sampling, has the shift 1 / z.

    Source: Balle, Wang 2018 (arXiv 1805.06530), Theorem 8; Dong, Roth, Su 2022 (arXiv 1905.02383), Corollary 2.13.

    >>> round(epsilon_of_shift(1.0, delta=1e-3), 3)
    3.139
    """
    return float(get_epsilon_gaussian(1 / shift, delta)) if shift > 0 else 0.0


@lru_cache(maxsize=4096)
def shift_of_epsilon(epsilon: float, *, delta: float) -> float:
    """The inverse of `epsilon_of_shift`."""
    return float(1 / get_sigma_gaussian(epsilon, delta))


@dataclass(frozen=True)
class Normal:
    """A Gaussian on the line; `spread` is its standard deviation, above 0."""

    mean: float
    spread: float


def epsilon_of_normals(one: Normal, other: Normal, *, delta: float) -> float:
    """The least epsilon at `delta` for which neither of two Gaussians gives a set more than e^epsilon times the other's
    probability plus delta; exact.

    Source: Steinke 2022 (arXiv 2210.00597), Proposition 7, as in Andrew et al. 2023 (arXiv 2302.03098), Section 3.
    """

    def excess(epsilon: float) -> float:
        return max(delta_of_normals(one, other, epsilon), delta_of_normals(other, one, epsilon)) - delta

    if excess(0.0) <= 0:
        return 0.0
    return math.inf if excess(MOST_EPSILON) > 0 else float(brentq(excess, 0.0, MOST_EPSILON, xtol=1e-10))


def delta_of_normals(one: Normal, other: Normal, epsilon: float) -> float:
    """The most that P(S) - e^epsilon Q(S) can be over all sets S, with P of `one` and Q of `other`: S lies between the
    roots of a x^2 + b x + c, the log of the ratio of densities less epsilon."""
    a = 0.5 * (other.spread**-2 - one.spread**-2)
    b = one.mean / one.spread**2 - other.mean / other.spread**2
    c = 0.5 * ((other.mean / other.spread) ** 2 - (one.mean / one.spread) ** 2)
    c += math.log(other.spread / one.spread) - epsilon
    square = b**2 - 4 * a * c
    if square <= 0:
        return 0.0  # the ratio never passes e^epsilon: it can't everywhere, for both are probabilities
    # The stable form of the two roots: no difference of nearly equal numbers.
    half = -0.5 * (b + math.copysign(math.sqrt(square), b))
    edges = np.array([-math.inf, *sorted((half / a, c / half)), math.inf])
    gained = _masses(one, edges) - np.exp(epsilon) * _masses(other, edges)
    return float(np.maximum(gained, 0).sum())


def _masses(normal: Normal, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """The probability of each interval between two edges; by the upper tail above the mean, where it keeps digits."""
    low, high = ((each - normal.mean) / normal.spread for each in (edges[:-1], edges[1:]))
    masses: NDArray[np.float64] = np.where(low > 0, ndtr(-low) - ndtr(-high), ndtr(high) - ndtr(low))
    return masses


@dataclass(frozen=True)
class GaussianFit:
    """Gaussians fitted to the scores of canaries that were in, and of those that were out.

    Assumed: scores are independent given the coins, and Gaussian. For orthogonal canaries under Gaussian noise without
    sampling that is so exactly; under Poisson sampling it holds in the limit of many rounds. It is an estimate.

    Attributes:
      seen, unseen: means and standard deviations (divisor n - 1).
      counts: the numbers of scores in, and out.
      centred: the mean of those that were out is known to be 0; then its spread is about 0, with divisor n.
    """

    seen: Normal
    unseen: Normal
    counts: tuple[int, int]
    centred: bool = False

    @property
    def free(self) -> tuple[int, int]:
        """The degrees of freedom of the two spreads."""
        return self.counts[0] - 1, self.counts[1] - (not self.centred)

    @property
    def one_spread(self) -> bool:
        """True if the F test does not tell the spreads apart at a false-alarm rate of `DOUBT`."""
        ratio = (self.seen.spread / self.unseen.spread) ** 2
        tail = min(f_distribution.cdf(ratio, *self.free), f_distribution.sf(ratio, *self.free))
        return bool(2 * tail > DOUBT)

    @property
    def shift(self) -> float:
        """The difference of the means in units of the pooled standard deviation: mu of Gaussian DP."""
        pooled = np.average([self.seen.spread**2, self.unseen.spread**2], weights=self.free)
        return float((self.seen.mean - self.unseen.mean) / math.sqrt(pooled))

    def epsilon(self, *, delta: float) -> float:
        """The estimate. With one spread it is that of `shift`; else exact for the two fitted Gaussians.

        Source: Andrew, Kairouz, Oh, Oprea, McMahan, Suriyakumar 2023 (arXiv 2302.03098), Section 3 and Algorithm 1,
        with the canaries that were out in place of the known N(0, 1 / d) of random directions.
        """
        if self.one_spread:
            return epsilon_of_shift(self.shift, delta=delta)
        return epsilon_of_normals(self.seen, self.unseen, delta=delta)

    def interval(self, *, delta: float, level: float = 0.95) -> tuple[float, float]:
        """An interval that holds the epsilon in a share `level` of repetitions, approximately and for many scores.

        With one spread: the shifts s for which (fitted - s)^2 <= z^2 Var(s), with the large-sample variance
        Var(s) = 1/n + 1/m + s^2 / (2 (n + m - 2)) (Hedges, Olkin 1985, Section 5.B), mapped to epsilon, which rises
        with s. With two: the delta method, for epsilon is a function of four independent fitted numbers. A mean that is
        known has no error: 1/m is left out.
        """
        quantile = float(norm.isf((1 - level) / 2))
        if not self.one_spread:
            centre, error = self.epsilon(delta=delta), quantile * self._standard_error(delta)
            return max(centre - error, 0.0), centre + error
        free = sum(self.free)
        of_means = 1 / self.counts[0] + (0.0 if self.centred else 1 / self.counts[1])
        shrink = quantile**2 / (2 * free)
        half = quantile * math.sqrt(self.shift**2 / (2 * free) + (1 - shrink) * of_means)
        low, high = ((self.shift + way * half) / (1 - shrink) for way in (-1, 1))
        return epsilon_of_shift(low, delta=delta), epsilon_of_shift(high, delta=delta)

    def lower_bound(self, *, delta: float, significance: float = 0.05) -> float:
        """A value that the epsilon is below in a share `significance` of repetitions, approximately.

        One-sided with one spread. With two it has half of that rate: a spread may differ either way, and both cost.
        """
        return self.interval(delta=delta, level=1 - (2 if self.one_spread else 1) * significance)[0]

    def _standard_error(self, delta: float) -> float:
        """Of the epsilon of two spreads."""

        def epsilon(fitted: NDArray[np.float64]) -> float:
            return epsilon_of_normals(Normal(*fitted[:2]), Normal(*fitted[2:]), delta=delta)

        fitted = np.array([self.seen.mean, self.seen.spread, self.unseen.mean, self.unseen.spread])
        spreads, free = fitted[[1, 1, 3, 3]], np.array(self.free)
        shares = [1 / self.counts[0], 1 / (2 * free[0]), 0.0 if self.centred else 1 / self.counts[1], 1 / (2 * free[1])]
        return float(np.linalg.norm(approx_fprime(fitted, epsilon, STEP * spreads) * spreads * np.sqrt(shares)))


def fit_gaussians(scores: Scores) -> GaussianFit | None:
    """Fits by moments; the mean of the canaries that were out is 0 if the scores are `centred`.

    None if there is nothing to fit: fewer than `FEWEST` scores of a kind, or scores of a kind that are all one; or if
    D'Agostino's test says that one of the two kinds is not Gaussian, at a false-alarm rate of `DOUBT` for both.
    """
    kinds = scores.seen, scores.unseen
    if any(len(values) < FEWEST or np.ptp(values) == 0 for values in kinds):
        return None
    if any(normaltest(values).pvalue <= DOUBT / 2 for values in kinds):
        return None
    seen, unseen = (Normal(float(values.mean()), float(values.std(ddof=1))) for values in kinds)
    if scores.centred:
        unseen = Normal(0.0, math.sqrt(float(np.mean(scores.unseen**2))))
    return GaussianFit(seen, unseen, (len(scores.seen), len(scores.unseen)), scores.centred)
