"""A lower bound of epsilon from guesses at many canaries in one run."""

from __future__ import annotations

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit
from scipy.stats import binom

from discreet.audit.gaussian_tradeoff import MOST_EPSILON
from discreet.audit.guesses import Guesses


def one_run_p_value(guesses: Guesses, *, epsilon: float, delta: float) -> float:
    """The most likely that so many correct guesses can be if the mechanism is (epsilon, delta)-DP.

    With W ~ Binomial(r, e^epsilon / (1 + e^epsilon)):
    P[W >= v] + 2 m delta max over i in 1 .. v of P[v > W >= v - i] / i.

    Assumed: each canary is in by its own fair coin, independent of everything else, and guesses are a function of what
    the mechanism released. Nothing is assumed of the mechanism, of the scores, or of how canaries influence each other.

    Source: Steinke, Nasr, Jagielski 2023 (arXiv 2305.08846), Theorem 5.2 and Appendix D.
    """
    success = expit(epsilon)
    least = float(binom.sf(guesses.correct - 1, guesses.made, success))
    if guesses.correct == 0:
        return 1.0
    below = np.arange(1, guesses.correct + 1)
    gained = np.cumsum(binom.pmf(guesses.correct - below, guesses.made, success))
    return float(min(1.0, least + 2 * guesses.canaries * delta * np.max(gained / below)))


def one_run_bound(guesses: Guesses, *, delta: float, significance: float = 0.05) -> float:
    """The largest epsilon whose p-value is at most `significance`; 0 if there is none.

    Guarantee: it passes the epsilon of the mechanism at `delta` with probability at most `significance`, if the number
    of guesses was decided without looking at the scores.
    """

    def room(epsilon: float) -> float:
        return one_run_p_value(guesses, epsilon=epsilon, delta=delta) - significance

    if room(0.0) >= 0:
        return 0.0
    most = 1.0
    while room(most) < 0:
        if most > MOST_EPSILON:
            return most
        most *= 2
    return float(brentq(room, 0.0, most, xtol=1e-9))
