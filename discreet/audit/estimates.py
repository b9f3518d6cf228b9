"""Epsilon from the scores of canaries: lower bounds from guesses about many canaries in one run,
and from many runs with and without one canary; and an estimate, with its interval, from Gaussians
fitted to the scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from dp_accounting import get_sigma_gaussian
from numpy.typing import NDArray
from scipy.optimize import approx_fprime, brentq
from scipy.special import expit, ndtr
from scipy.stats import beta, binom, norm, normaltest
from scipy.stats import f as f_distribution

from discreet.accounting.unsampled_gaussian import gaussian_epsilon
from discreet.audit.canaries import Scores

FEWEST = 20  # with fewer scores of a kind nothing is fitted
# false-alarm rate of the tests that spreads differ, or that scores are not Gaussian
DOUBT = 1e-3
STEP = 1e-4  # of numerical derivatives, in units of a spread
MOST_FITTED = 700.0  # a larger epsilon is meaningless, and e^epsilon overflows
MOST_EPSILON = 50.0  # of a bound from guesses: above it every guess is certain in floating point
MOST_SHIFT = 100.0  # its epsilon is above 5000
PLANS = 12  # numbers of guesses that are compared
WITHOUT_CLAIM = 1.0  # the shift for which guesses are planned if the ledger claims nothing
THRESHOLDS = 200  # thresholds that are tried on the first half of repeated scores
_UNIT = NormalDist()


@lru_cache(maxsize=4096)
def epsilon_of_shift(shift: float, *, delta: float) -> float:
    """Epsilon at `delta` of N(shift, 1) against N(0, 1), in both directions; 0 for a shift at or
    below 0.

    A Gaussian mechanism with noise multiplier z, without sampling, has the shift 1 / z.

    Source: Balle, Wang 2018 (arXiv 1805.06530), Theorem 8; Dong, Roth, Su 2022 (arXiv 1905.02383),
      Corollary 2.13.

    >>> round(epsilon_of_shift(1.0, delta=1e-3), 3)
    3.139
    """
    if shift > 0:
        return gaussian_epsilon(1 / shift, delta=delta)
    return 0.0


@lru_cache(maxsize=4096)
def shift_of_epsilon(epsilon: float, *, delta: float) -> float:
    """The inverse of `epsilon_of_shift`."""
    return float(1 / get_sigma_gaussian(epsilon, delta))


class Normal(NamedTuple):
    """A Gaussian on the line; `spread` is its standard deviation, above 0."""

    mean: float
    spread: float


def epsilon_of_normals(one: Normal, other: Normal, *, delta: float) -> float:
    """The least epsilon for which neither of two Gaussians gives any set more than e^epsilon times
    the other's probability plus delta; exact.

    Source: Steinke 2022 (arXiv 2210.00597), Proposition 7, as in Andrew et al. 2023 (arXiv
    2302.03098), Section 3."""

    def room(epsilon: float) -> float:
        one_way = delta_of_normals(one, other, epsilon)
        return delta - max(one_way, delta_of_normals(other, one, epsilon))

    return _root(room, MOST_FITTED, beyond=math.inf)


def _root(rising: Callable[[float], float], most: float, *, beyond: float) -> float:
    """Where a rising function is 0: 0 if it is above that at 0 already, `beyond` if it is still
    below at `most`."""
    if rising(0.0) >= 0:
        return 0.0
    if rising(most) < 0:
        return beyond
    return float(brentq(rising, 0.0, most, xtol=1e-10))


def delta_of_normals(one: Normal, other: Normal, epsilon: float) -> float:
    """The maximum of P(S) - e^epsilon Q(S) over all sets S, with P of `one` and Q of `other`. The
    ends of S are the roots of a x^2 + b x + c, the log of the ratio of densities minus epsilon."""
    a = 0.5 * (other.spread**-2 - one.spread**-2)
    b = one.mean / one.spread**2 - other.mean / other.spread**2
    c = 0.5 * ((other.mean / other.spread) ** 2 - (one.mean / one.spread) ** 2)
    c += math.log(other.spread / one.spread) - epsilon
    square = b**2 - 4 * a * c
    if square <= 0:
        # The ratio never exceeds e^epsilon. It can't do so everywhere, as both are probabilities.
        return 0.0
    # The stable form of the two roots avoids a difference of nearly equal numbers.
    half = -0.5 * (b + math.copysign(math.sqrt(square), b))
    edges = np.array([-math.inf, *sorted((half / a, c / half)), math.inf])
    gained = _masses(one, edges) - np.exp(epsilon) * _masses(other, edges)
    return float(np.maximum(gained, 0).sum())


def _masses(normal: Normal, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """The probability of each interval between two edges. Above the mean the upper tail is used,
    which keeps digits."""
    low, high = ((each - normal.mean) / normal.spread for each in (edges[:-1], edges[1:]))
    masses: NDArray[np.float64] = np.where(
        low > 0, ndtr(-low) - ndtr(-high), ndtr(high) - ndtr(low)
    )
    return masses


@dataclass(frozen=True)
class GaussianFit:
    """Gaussians fitted to the scores of canaries that were in, and of those that were out.

    Assumed: scores are independent given the coins, and Gaussian. This is exact for orthogonal
    canaries under Gaussian noise without sampling; under Poisson sampling it holds in the limit of
    many rounds. So the result is an estimate.

    Attributes:
      seen, unseen: means and standard deviations (divisor n - 1) of the scores in and out.
      counts: the numbers of scores in and out.
      centred: True if the mean of the scores out is known to be 0; their spread is then taken about
        0, with divisor n.
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
        """True if the F test finds no difference of the spreads at a false-alarm rate of
        `DOUBT`."""
        ratio = (self.seen.spread / self.unseen.spread) ** 2
        tail = min(f_distribution.cdf(ratio, *self.free), f_distribution.sf(ratio, *self.free))
        return bool(2 * tail > DOUBT)

    @property
    def shift(self) -> float:
        """The difference of the means in units of the pooled standard deviation: mu of Gaussian
        DP."""
        pooled = np.average([self.seen.spread**2, self.unseen.spread**2], weights=self.free)
        return float((self.seen.mean - self.unseen.mean) / math.sqrt(pooled))

    def epsilon(self, *, delta: float) -> float:
        """The estimate of epsilon. With one spread it is that of `shift`; otherwise it is exact for
        the two fitted Gaussians.

        Source: Andrew, Kairouz, Oh, Oprea, McMahan, Suriyakumar 2023 (arXiv 2302.03098), Section 3
        and Algorithm 1, with the canaries that were out in place of the known N(0, 1 / d) of random
        directions.
        """
        if self.one_spread:
            return epsilon_of_shift(self.shift, delta=delta)
        return epsilon_of_normals(self.seen, self.unseen, delta=delta)

    def interval(self, *, delta: float, level: float = 0.95) -> tuple[float, float]:
        """A confidence interval for epsilon with coverage `level`, approximately and for many
        scores.

        With one spread: the shifts s for which (fitted - s)^2 <= z^2 Var(s), with the large-sample
        variance Var(s) = 1/n + 1/m + s^2 / (2 (n + m - 2)) (Hedges, Olkin 1985, Section 5.B),
        mapped to epsilon, which increases with s. With two spreads: the delta method, as epsilon is
        a function of four independent fitted numbers. A known mean has no error: 1/m is left out.
        """
        quantile = float(norm.isf((1 - level) / 2))
        if not self.one_spread:
            centre = self.epsilon(delta=delta)
            error = quantile * self._standard_error(delta)
            return max(centre - error, 0.0), centre + error
        free = sum(self.free)
        of_means = 1 / self.counts[0] + (0.0 if self.centred else 1 / self.counts[1])
        shrink = quantile**2 / (2 * free)
        half = quantile * math.sqrt(self.shift**2 / (2 * free) + (1 - shrink) * of_means)
        low, high = ((self.shift + way * half) / (1 - shrink) for way in (-1, 1))
        return epsilon_of_shift(low, delta=delta), epsilon_of_shift(high, delta=delta)

    def lower_bound(self, *, delta: float, significance: float = 0.05) -> float:
        """A lower confidence bound: it exceeds the epsilon in a share `significance` of
        repetitions, approximately. One-sided with one spread. With two spreads the rate is halved,
        as a spread may differ in either direction, and both cost privacy."""
        return self.interval(delta=delta, level=1 - (2 if self.one_spread else 1) * significance)[0]

    def _standard_error(self, delta: float) -> float:
        """The standard error of the epsilon of two spreads."""

        def epsilon(fitted: NDArray[np.float64]) -> float:
            return epsilon_of_normals(Normal(*fitted[:2]), Normal(*fitted[2:]), delta=delta)

        fitted = np.array([self.seen.mean, self.seen.spread, self.unseen.mean, self.unseen.spread])
        spreads = fitted[[1, 1, 3, 3]]
        free = np.array(self.free)
        shares = [
            1 / self.counts[0],
            1 / (2 * free[0]),
            0.0 if self.centred else 1 / self.counts[1],
            1 / (2 * free[1]),
        ]
        return float(
            np.linalg.norm(
                approx_fprime(fitted, epsilon, STEP * spreads) * spreads * np.sqrt(shares)
            )
        )


def fit_gaussians(scores: Scores) -> GaussianFit | None:
    """Fits by moments; the mean of the scores out is 0 if the scores are `centred`. None if a kind
    has fewer than `FEWEST` scores, if its scores are all equal, or if D'Agostino's test finds that
    one of the two kinds is not Gaussian, at a false-alarm rate of `DOUBT` for both together."""
    kinds = scores.seen, scores.unseen
    if any(len(values) < FEWEST or np.ptp(values) == 0 for values in kinds):
        return None
    if any(normaltest(values).pvalue <= DOUBT / 2 for values in kinds):
        return None
    seen, unseen = (Normal(float(values.mean()), float(values.std(ddof=1))) for values in kinds)
    if scores.centred:
        unseen = Normal(0.0, math.sqrt(float(np.mean(scores.unseen**2))))
    return GaussianFit(seen, unseen, (len(scores.seen), len(scores.unseen)), scores.centred)


@dataclass(frozen=True)
class Guesses:
    """r guesses, v of them correct, about m canaries, each in or out by its own fair coin."""

    canaries: int  # m
    made: int  # r, within [1, m]: there is no guess about the other canaries
    correct: int  # v, within [0, r]


def guess_membership(scores: Scores, *, made: int) -> Guesses:
    """Guesses "in" for the highest scores and "out" for the lowest, half of `made` each (one more
    "in" if it is odd). Equal scores are ordered by position, independently of the coins."""
    order = np.argsort(scores.values, kind="stable")
    out = made // 2
    said_out = order[:out]
    said_in = order[len(order) - made + out :]
    return Guesses(
        len(order), made, int(np.sum(~scores.included[said_out]) + np.sum(scores.included[said_in]))
    )


@lru_cache(maxsize=64)
def planned_guesses(canaries: int, epsilon: float, delta: float, *, shifts: bool) -> int:
    """The number of guesses for which `one_run_bound`, or with `shifts` `fdp_bound`, is largest if
    scores are N(s, 1) in and N(0, 1) out, with the s of the claim. It reads no score, so a bound
    needs no correction for this choice."""
    if 0 < epsilon < math.inf:
        shift = shift_of_epsilon(epsilon, delta=delta)
    else:
        shift = WITHOUT_CLAIM
    bound: Callable[[Guesses], float] = (
        fdp_shift_bound if shifts else partial(one_run_bound, delta=delta)
    )
    best = -1.0
    number = canaries
    for cut in shift / 2 + np.linspace(0, 2.5, PLANS):
        right = ndtr(shift - cut)
        wrong = ndtr(-cut)
        # two tails, and each canary is in with probability 1/2
        made = int(canaries * (right + wrong))
        correct = int(canaries * right)
        if correct < 1:
            break
        found = bound(Guesses(canaries, made, correct))
        if found > best:
            best = found
            number = made
    return number


def one_run_p_value(guesses: Guesses, *, epsilon: float, delta: float) -> float:
    """The largest probability of at least v correct guesses if the mechanism is (epsilon,
    delta)-DP.

    With W ~ Binomial(r, e^epsilon / (1 + e^epsilon)):
    P[W >= v] + 2 m delta max over i in 1 .. v of P[v > W >= v - i] / i.

    Assumed: each canary is in by its own fair coin, independent of everything else, and guesses are
    a function of the release. Nothing is assumed about the mechanism, the scores, or the influence
    of canaries on each other.

    Source: Steinke, Nasr, Jagielski 2023 (arXiv 2305.08846), Theorem 5.2 and Appendix D.
    """
    if guesses.correct == 0:
        return 1.0
    success = expit(epsilon)
    below = np.arange(1, guesses.correct + 1)
    gained = np.cumsum(binom.pmf(guesses.correct - below, guesses.made, success))
    least = binom.sf(guesses.correct - 1, guesses.made, success)
    return float(min(1.0, least + 2 * guesses.canaries * delta * np.max(gained / below)))


def one_run_bound(guesses: Guesses, *, delta: float, significance: float = 0.05) -> float:
    """The largest epsilon whose p-value is at most `significance`; 0 if there is none.

    Guarantee: it exceeds the epsilon of the mechanism at `delta` with probability at most
    `significance`, if the number of guesses was chosen without looking at the scores.
    """

    def room(epsilon: float) -> float:
        return one_run_p_value(guesses, epsilon=epsilon, delta=delta) - significance

    return _root(room, MOST_EPSILON, beyond=MOST_EPSILON)


def least_probability(guesses: Guesses, *, shift: float, level: float) -> float:
    """The total probability, times r / m, that a Gaussian-DP mechanism needs if v correct guesses
    of r have probability `level`. More than r / m is impossible, and refutes the mechanism.

    For j from v down: let right be the probability that a random canary is guessed correctly while
    at least j guesses are correct, and wrong that it is guessed wrongly while at least j are.
    Flipping that canary's coin turns the first event for j + 1 into the second for j, so that
    Phi(Phi^-1(right) - shift) <= wrong one step lower.

    Source: Mahloujifar, Melis, Chaudhuri 2025 (arXiv 2410.22235), Algorithm 3, for the trade-off
    function of Gaussian DP (Dong, Roth, Su 2022, arXiv 1905.02383, Definition 2.6).
    """
    made = guesses.made
    right = level * guesses.correct / guesses.canaries
    wrong = level * (made - guesses.correct) / guesses.canaries
    for correct in range(guesses.correct - 1, -1, -1):
        if 0 < right < 1:
            needed = _UNIT.cdf(_UNIT.inv_cdf(right) - shift)
        else:
            needed = float(right >= 1)
        if needed <= wrong:
            break
        right = min(1.0, right + correct / (made - correct) * (needed - wrong))
        wrong = needed
    return right + wrong


def fdp_shift_bound(guesses: Guesses, *, significance: float = 0.05) -> float:
    """The largest shift of Gaussian DP that the guesses refute: 0 if there is none.

    Guarantee: it exceeds the shift of a Gaussian-DP mechanism with probability at most
    `significance`. Assumed: fair and independent coins, guesses from the release alone, and their
    number chosen without looking at the scores.
    """

    def room(shift: float) -> float:
        return guesses.made / guesses.canaries - least_probability(
            guesses, shift=shift, level=significance
        )

    return _root(room, MOST_SHIFT, beyond=MOST_SHIFT)


def fdp_bound(guesses: Guesses, *, delta: float, significance: float = 0.05) -> float:
    """`fdp_shift_bound` as an epsilon at `delta`, for mechanisms that are Gaussian-DP with the
    shift of that epsilon, as Gaussian mechanisms are. It is not valid for Laplace noise."""
    return epsilon_of_shift(fdp_shift_bound(guesses, significance=significance), delta=delta)


def repeated_bound(scores: Scores, *, delta: float, significance: float = 0.05) -> float:
    """log((1 - delta - b) / a), the larger of both directions, with upper limits a, b of a
    threshold's two error rates.

    Threshold and direction are chosen on every other score; the rates are counted on the rest, with
    Clopper-Pearson limits at `significance` / 2 each. At or above 0.

    Guarantee: it exceeds the epsilon of the mechanism at `delta` with probability at most
    `significance`. Assumed: the scores are of independent releases. Nothing is assumed about their
    distribution.

    Source: Jagielski, Ullman, Oprea 2020 (arXiv 2006.07709), Algorithm 1; Nasr et al. 2021 (arXiv
    2101.04535), Eq. 2 and 3; Clopper, Pearson 1934.
    """
    first, rest = ((scores.seen[start::2], scores.unseen[start::2]) for start in (0, 1))
    if min(map(len, rest)) == 0:
        return 0.0
    cuts = np.unique(np.quantile(np.concatenate(first), np.linspace(0, 1, THRESHOLDS)))
    both_ways = partial(_both_ways, delta=delta, level=significance / 2)
    ways = both_ways(*first, cuts)
    way, number = np.unravel_index(int(np.argmax(ways)), ways.shape)
    return float(max(both_ways(*rest, cuts[[number]])[way, 0], 0.0))


def _both_ways(
    seen: NDArray[np.float64],
    unseen: NDArray[np.float64],
    cuts: NDArray[np.float64],
    *,
    delta: float,
    level: float,
) -> NDArray[np.float64]:
    """(2, cuts): the bound from "in is likely above the cut", and from "out is likely below it"."""
    missed = _upper_limit(np.searchsorted(np.sort(seen), cuts), len(seen), level)
    false = _upper_limit(len(unseen) - np.searchsorted(np.sort(unseen), cuts), len(unseen), level)
    with np.errstate(divide="ignore"):
        return np.log(
            np.maximum(1 - delta - np.stack([missed, false]), 0) / np.stack([false, missed])
        )


def _upper_limit(counts: NDArray[np.int64], number: int, level: float) -> NDArray[np.float64]:
    """Clopper-Pearson's upper limit of a counted rate: below the true rate with probability at most
    `level`."""
    inside = np.minimum(counts, number - 1)
    return np.where(counts < number, beta.isf(level, inside + 1, number - inside), 1.0)
