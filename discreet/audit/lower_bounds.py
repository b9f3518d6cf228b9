"""Lower bounds of epsilon: from guesses at many canaries in one run, and from many runs with and without one canary."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import expit, ndtr
from scipy.stats import beta, binom

from discreet.audit.canary_scores import Scores
from discreet.audit.gaussian_fit import epsilon_of_shift, shift_of_epsilon

MOST_EPSILON = 50.0  # of a bound from guesses: beyond it every guess is certain in floating point
MOST_SHIFT = 100.0  # its epsilon is above 5000
PLANS = 12  # numbers of guesses that are compared
WITHOUT_CLAIM = 1.0  # the shift that guesses are planned for if the ledger claims nothing
THRESHOLDS = 200  # that are tried on the first half of repeated scores
_UNIT = NormalDist()


@dataclass(frozen=True)
class Guesses:
    """r guesses who was in, of which v are correct, at m canaries, each in or out by its own fair coin."""

    canaries: int  # m
    made: int  # r, within [1, m]: nothing is said of the other canaries
    correct: int  # v, within [0, r]


def guess(scores: Scores, *, made: int) -> Guesses:
    """Says "in" of the highest scores and "out" of the lowest, half of `made` each (one more "in" if it is odd). Of
    equal scores the first come first: the coins decide nothing."""
    order, out = np.argsort(scores.values, kind="stable"), made // 2
    said_out, said_in = order[:out], order[len(order) - made + out :]
    return Guesses(len(order), made, int(np.sum(~scores.included[said_out]) + np.sum(scores.included[said_in])))


@lru_cache(maxsize=64)
def planned(canaries: int, epsilon: float, delta: float, *, shifts: bool) -> int:
    """The number of guesses that makes `one_run_bound`, or with `shifts` `fdp_bound`, largest if scores are N(s, 1) in
    and N(0, 1) out, with the s of the claim. It reads no score, so a bound needs no correction for having chosen."""
    shift = shift_of_epsilon(epsilon, delta=delta) if 0 < epsilon < math.inf else WITHOUT_CLAIM
    bound: Callable[[Guesses], float] = fdp_shift_bound if shifts else partial(one_run_bound, delta=delta)
    best, number = -1.0, canaries
    for cut in shift / 2 + np.linspace(0, 2.5, PLANS):
        right, wrong = ndtr(shift - cut), ndtr(-cut)
        made = int(canaries * (right + wrong))  # two tails, and each canary is in with probability 1/2
        correct = int(canaries * right)
        if correct < 1:
            break
        found = bound(Guesses(canaries, made, correct))
        if found > best:
            best, number = found, made
    return number


def one_run_p_value(guesses: Guesses, *, epsilon: float, delta: float) -> float:
    """The largest probability of so many correct guesses if the mechanism is (epsilon, delta)-DP.

    With W ~ Binomial(r, e^epsilon / (1 + e^epsilon)):
    P[W >= v] + 2 m delta max over i in 1 .. v of P[v > W >= v - i] / i.

    Assumed: each canary is in by its own fair coin, independent of everything else, and guesses are a function of the
    release. Nothing is assumed of the mechanism, of the scores, or of how canaries influence each other.

    Source: Steinke, Nasr, Jagielski 2023 (arXiv 2305.08846), Theorem 5.2 and Appendix D.
    """
    if guesses.correct == 0:
        return 1.0
    success, below = expit(epsilon), np.arange(1, guesses.correct + 1)
    gained = np.cumsum(binom.pmf(guesses.correct - below, guesses.made, success))
    least = binom.sf(guesses.correct - 1, guesses.made, success)
    return float(min(1.0, least + 2 * guesses.canaries * delta * np.max(gained / below)))


def one_run_bound(guesses: Guesses, *, delta: float, significance: float = 0.05) -> float:
    """The largest epsilon whose p-value is at most `significance`; 0 if there is none.

    Guarantee: it passes the epsilon of the mechanism at `delta` with probability at most `significance`, if the number
    of guesses was decided without looking at the scores.
    """

    def room(epsilon: float) -> float:
        return one_run_p_value(guesses, epsilon=epsilon, delta=delta) - significance

    return 0.0 if room(0.0) >= 0 else float(brentq(room, 0.0, MOST_EPSILON, xtol=1e-9))


def least_probability(guesses: Guesses, *, shift: float, level: float) -> float:
    """The probability that a Gaussian-DP mechanism needs, times r / m, if v correct guesses of r have probability
    `level`. More than r / m is impossible, and refutes it.

    For j from v down: let right be the probability that a random canary is guessed correctly while at least j guesses
    are correct, and wrong that it is guessed wrongly while at least j are. Turning that canary's coin makes the first
    event of j + 1 the second of j, so that Phi(Phi^-1(right) - shift) <= wrong one step lower.

    Source: Mahloujifar, Melis, Chaudhuri 2025 (arXiv 2410.22235), Algorithm 3, for the trade-off
    function of Gaussian DP (Dong, Roth, Su 2022, arXiv 1905.02383, Definition 2.6).
    """
    made = guesses.made
    right = level * guesses.correct / guesses.canaries
    wrong = level * (made - guesses.correct) / guesses.canaries
    for correct in range(guesses.correct - 1, -1, -1):
        needed = _UNIT.cdf(_UNIT.inv_cdf(right) - shift) if 0 < right < 1 else float(right >= 1)
        if needed <= wrong:
            break
        right = min(1.0, right + correct / (made - correct) * (needed - wrong))
        wrong = needed
    return right + wrong


def fdp_shift_bound(guesses: Guesses, *, significance: float = 0.05) -> float:
    """The largest shift of Gaussian DP that the guesses refute: 0 if there is none.

    Guarantee: it passes the shift of a Gaussian-DP mechanism with probability at most `significance`. Assumed: fair and
    independent coins, guesses from the release alone, and their number decided without looking at the scores.
    """

    def room(shift: float) -> float:
        return guesses.made / guesses.canaries - least_probability(guesses, shift=shift, level=significance)

    if room(0.0) >= 0:
        return 0.0
    return MOST_SHIFT if room(MOST_SHIFT) < 0 else float(brentq(room, 0.0, MOST_SHIFT, xtol=1e-9))


def fdp_bound(guesses: Guesses, *, delta: float, significance: float = 0.05) -> float:
    """`fdp_shift_bound` as an epsilon at `delta`: for mechanisms that are Gaussian-DP with the shift of that epsilon,
    as Gaussian ones are. It is no bound for Laplace noise."""
    return epsilon_of_shift(fdp_shift_bound(guesses, significance=significance), delta=delta)


def repeated_bound(scores: Scores, *, delta: float, significance: float = 0.05) -> float:
    """log((1 - delta - b) / a), the larger of both ways, with upper limits a, b of a threshold's two error rates.

    The threshold, and the way, are chosen on every other score; the rates are counted on the rest, with
    Clopper-Pearson limits at `significance` / 2 each. At or above 0.

    Guarantee: it passes the epsilon of the mechanism at `delta` with probability at most `significance`. Assumed: the
    scores are of independent releases. Nothing is assumed of their distribution.

    Source: Jagielski, Ullman, Oprea 2020 (arXiv 2006.07709), Algorithm 1; Nasr et al. 2021 (arXiv 2101.04535), Eq. 2
    and 3; Clopper, Pearson 1934.
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
    seen: NDArray[np.float64], unseen: NDArray[np.float64], cuts: NDArray[np.float64], *, delta: float, level: float
) -> NDArray[np.float64]:
    """(2, cuts): the bound from "in is likely above the cut", and from "out is likely below it"."""
    missed = _upper_limit(np.searchsorted(np.sort(seen), cuts), len(seen), level)
    false = _upper_limit(len(unseen) - np.searchsorted(np.sort(unseen), cuts), len(unseen), level)
    with np.errstate(divide="ignore"):
        return np.log(np.maximum(1 - delta - np.stack([missed, false]), 0) / np.stack([false, missed]))


def _upper_limit(counts: NDArray[np.int64], number: int, level: float) -> NDArray[np.float64]:
    """Clopper-Pearson's upper limit of a rate that was counted: below the rate with probability at most `level`."""
    inside = np.minimum(counts, number - 1)
    return np.where(counts < number, beta.isf(level, inside + 1, number - inside), 1.0)
