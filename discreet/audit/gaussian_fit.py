"""The Gaussian fit: an estimate of epsilon, with its interval, from Gaussians fitted to the scores."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import f as f_distribution
from scipy.stats import norm, normaltest

from discreet.audit.canary_scores import CanaryScores, RepeatedScores
from discreet.audit.gaussian_tradeoff import Normal, epsilon_of_normals, epsilon_of_shift

FEWEST = 20  # scores of a kind, below which a fit says nothing
DOUBT = 1e-3  # a test with this false-alarm rate says that spreads differ, or that scores are not Gaussian
STEP = 1e-4  # of numerical derivatives, in units of a standard error


@dataclass(frozen=True)
class GaussianFit:
    """Gaussians fitted to the scores of canaries that were in, and of those that were out.

    Assumed: scores are independent given the coins, and Gaussian. For orthogonal canaries under Gaussian noise without
    sampling that is so exactly; under Poisson sampling it holds in the limit of many rounds. It is an estimate: a
    mechanism whose scores are not Gaussian (Laplace, one round of a small cohort) has another epsilon.

    Attributes:
      seen, unseen: means and standard deviations (divisor n - 1).
      counts: how many scores were in, and out.
      centred: whether the mean of those that were out is known to be 0; then its spread is about 0, with divisor n.
      gaussian: False if D'Agostino's test rejects one of the two groups, at a false-alarm rate of `DOUBT`.
    """

    seen: Normal
    unseen: Normal
    counts: tuple[int, int]
    gaussian: bool
    centred: bool = False

    @property
    def free(self) -> tuple[int, int]:
        """The degrees of freedom of the two spreads."""
        return self.counts[0] - 1, self.counts[1] - (not self.centred)

    @property
    def one_spread(self) -> bool:
        """Whether both spreads may be one: the F test does not tell them apart at a false-alarm rate of `DOUBT`."""
        free = self.free
        ratio = (self.seen.spread / self.unseen.spread) ** 2
        tail = min(f_distribution.cdf(ratio, *free), f_distribution.sf(ratio, *free))
        return bool(2 * tail > DOUBT)

    @property
    def shift(self) -> float:
        """The difference of the means in units of the pooled standard deviation: mu of Gaussian DP."""
        free = self.free
        squares = free[0] * self.seen.spread**2 + free[1] * self.unseen.spread**2
        return (self.seen.mean - self.unseen.mean) / math.sqrt(squares / sum(free))

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
        if self.one_spread:
            low, high = self._shifts(quantile)
            return epsilon_of_shift(low, delta=delta), epsilon_of_shift(high, delta=delta)
        centre, error = self.epsilon(delta=delta), self._standard_error(delta)
        return max(centre - quantile * error, 0.0), centre + quantile * error

    def lower_bound(self, *, delta: float, significance: float = 0.05) -> float:
        """A value that the epsilon is below in a share `significance` of repetitions, approximately.

        One-sided with one spread. With two it has half of that rate: a spread may differ either way, and both cost.
        """
        return self.interval(delta=delta, level=1 - (2 if self.one_spread else 1) * significance)[0]

    def _shifts(self, quantile: float) -> tuple[float, float]:
        free = sum(self.free)
        of_means = 1 / self.counts[0] + (0.0 if self.centred else 1 / self.counts[1])
        shrink = quantile**2 / (2 * free)
        half = quantile * math.sqrt(self.shift**2 / (2 * free) + (1 - shrink) * of_means)
        return (self.shift - half) / (1 - shrink), (self.shift + half) / (1 - shrink)

    def _standard_error(self, delta: float) -> float:
        """Of the epsilon of two spreads, by central differences over a mean and a spread of each Gaussian."""
        total = 0.0
        for which, count in enumerate(self.counts):
            normals = [self.seen, self.unseen]
            for mean, spread in ((1.0, 0.0), (0.0, 1.0))[self.centred and which == 1 :]:
                error = normals[which].spread / math.sqrt(count if mean else 2 * self.free[which])
                values = []
                for sign in (1, -1):
                    moved = list(normals)
                    step = sign * STEP * error
                    moved[which] = Normal(normals[which].mean + mean * step, normals[which].spread + spread * step)
                    values.append(epsilon_of_normals(*moved, delta=delta))
                total += ((values[0] - values[1]) / (2 * STEP)) ** 2
        return math.sqrt(total)


def can_fit(scores: CanaryScores | RepeatedScores) -> bool:
    """Whether there are at least `FEWEST` scores of each kind, and they are not all one."""
    return all(len(values) >= FEWEST and np.ptp(values) > 0 for values in (scores.seen, scores.unseen))


def fit_gaussians(scores: CanaryScores | RepeatedScores) -> GaussianFit:
    """Fits by moments; the mean of the canaries that were out is 0 if the scores are `centred`.

    Raises:
      ValueError: fewer than `FEWEST` scores of a kind, or scores of a kind that are all equal.
    """
    centred = isinstance(scores, CanaryScores) and scores.centred
    seen, unseen = _normal("in", scores.seen), _normal("out", scores.unseen)
    if centred:
        unseen = Normal(0.0, math.sqrt(float(np.mean(scores.unseen**2))))
    return GaussianFit(
        *(seen, unseen, (len(scores.seen), len(scores.unseen))),
        centred=centred,
        gaussian=all(normaltest(values).pvalue > DOUBT / 2 for values in (scores.seen, scores.unseen)),
    )


def _normal(name: str, values: NDArray[np.float64]) -> Normal:
    if len(values) < FEWEST:
        raise ValueError(f"a Gaussian fit needs at least {FEWEST} canaries that were {name} (got {len(values)})")
    spread = float(values.std(ddof=1))
    if spread == 0:
        raise ValueError(f"all canaries that were {name} have one score: there is no noise in it")
    return Normal(float(values.mean()), spread)
