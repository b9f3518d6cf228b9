"""A lower bound of epsilon from guesses at many canaries in one run, for mechanisms as private as a Gaussian one."""

from __future__ import annotations

from statistics import NormalDist

from scipy.optimize import brentq

from discreet.audit.gaussian_tradeoff import epsilon_of_shift
from discreet.audit.guesses import Guesses

MOST_SHIFT = 100.0  # its epsilon is above 5000
_UNIT = NormalDist()


def least_probability(guesses: Guesses, *, shift: float, level: float) -> float:
    """How much probability a Gaussian-DP mechanism needs, times r / m, if v correct guesses of r have probability
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
    """The largest shift that the guesses refute: 0 if there is none.

    Guarantee: it passes the shift of a Gaussian-DP mechanism with probability at most `significance`. Assumed: fair and
    independent coins, guesses from the release alone, and their number decided without looking at the scores.
    """

    def room(shift: float) -> float:
        return guesses.made / guesses.canaries - least_probability(guesses, shift=shift, level=significance)

    if room(0.0) >= 0:
        return 0.0
    if room(MOST_SHIFT) < 0:
        return MOST_SHIFT
    return float(brentq(room, 0.0, MOST_SHIFT, xtol=1e-9))


def fdp_bound(guesses: Guesses, *, delta: float, significance: float = 0.05) -> float:
    """`fdp_shift_bound` as an epsilon at `delta`.

    It refutes (epsilon, delta) for mechanisms that are Gaussian-DP with the shift of that epsilon: Gaussian ones do
    exactly. It is no bound for Laplace noise, which is (epsilon, 0)-DP and less private than that on other events.
    """
    return epsilon_of_shift(fdp_shift_bound(guesses, significance=significance), delta=delta)
