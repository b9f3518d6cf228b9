"""How small a fault an audit is able to find: computed from the settings alone, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from scipy.optimize import brentq
from scipy.stats import norm

from discreet.audit.canary_scores import Releases, RepeatedScores
from discreet.audit.fdp_bound import fdp_bound, fdp_shift_bound
from discreet.audit.gaussian_fit import FEWEST
from discreet.audit.gaussian_tradeoff import shift_of_epsilon
from discreet.audit.guesses import Guesses, planned_number
from discreet.audit.one_run_bound import one_run_bound
from discreet.audit.repeated_bound import repeated_bound

POWER = 0.9  # the share of audits that find it
MOST_CANARIES = 10**7
HALF = 0.5
LEAST_SHARE = 1e-3  # of the noise: with less there is as good as none
WITHOUT_CLAIM = 1.0  # the shift that guesses are planned for if the ledger claims nothing


def smallest_fault(releases: Releases, canaries: int, *, level: float) -> float | None:
    """How much of its size noise may have left, within (0, 1), to be found in nine of ten audits by the Gaussian fit;
    None if not even noise that is gone would be.

    Args:
      canaries: of all runs together.
      level: of the fit's lower bound, one-sided.
    """
    if canaries < 3 * FEWEST:  # with fewer the coins too often leave less than `FEWEST` of a kind
        return None

    def excess(share: float) -> float:
        return _power_excess(releases, share, canaries, level)

    if excess(LEAST_SHARE) <= 0:
        return None
    return float(brentq(excess, LEAST_SHARE, 1.0, xtol=1e-6)) if excess(1.0) < 0 else 1.0


def canaries_needed(releases: Releases, *, share: float, level: float) -> int | None:
    """How many canaries find noise of `share` of its size in nine of ten audits; None if no number of them does."""
    low, high = 3 * FEWEST, MOST_CANARIES
    if _power_excess(releases, share, high, level) <= 0:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if _power_excess(releases, share, middle, level) <= 0 else (low, middle)
    return low


def _power_excess(releases: Releases, share: float, canaries: int, level: float) -> float:
    """Above 0 if nine of ten fits pass the claim by so much that the claim is refuted."""
    claimed = shift_of_epsilon(releases.epsilon, delta=releases.delta)
    true = releases.shift(share)
    refuting = claimed + norm.isf(level) * _error(releases, claimed, canaries)
    return float(true - norm.isf(1 - POWER) * _error(releases, true, canaries) - refuting)


def _error(releases: Releases, shift: float, canaries: int) -> float:
    """The standard error of a fitted shift, half of the canaries being out: `GaussianFit.interval`."""
    return math.sqrt((4 if releases.repeated else 2) / canaries + shift**2 / (2 * canaries))


@dataclass(frozen=True)
class Power:
    """What an audit is able to find, in words; `finds`: whether that is anything."""

    says: str
    finds: bool


def power_of(releases: Releases, count: int, *, level: float) -> Power:
    """What an audit can find whose bounds have this level.

    Args:
      count: how many canaries, of all runs together; if one is released again and again, how often with it, and as
        often without.
    """
    if not releases.epsilon < math.inf:
        return Power("it could have found nothing: there is no claim", finds=False)
    many = f"{count} releases with the canary and as many without" if releases.repeated else f"{count} canaries"
    scores = 2 * count if releases.repeated else count
    fitted = _fitted(releases, scores, level) if releases.gaussian else None
    few = f"; they are too few for the Gaussian fit, which needs {3 * FEWEST}" if scores < 3 * FEWEST else ""
    shown = _shown_without_noise(releases, count, level)
    without = f"without any noise {many} show epsilon {shown:.3g} on average, and {releases.epsilon:.4g} is claimed"
    if fitted is None and shown <= releases.epsilon:
        return Power(f"it could have found nothing: even {without}{few}", finds=False)
    return Power(f"what it could have found: {without}" + (f"; {fitted}" if fitted else few), finds=True)


def _fitted(releases: Releases, canaries: int, level: float) -> str | None:
    """What the Gaussian fit finds, in words; None if that is nothing."""
    share = smallest_fault(releases, canaries, level=level)
    if share is None:
        return None
    needed = canaries_needed(releases, share=HALF, level=level)
    said = f"in nine of ten audits they refute the claim if noise has {share:.0%} of its size or less"
    if needed is None:
        return f"{said}; noise at half its size is not found by any number of them"
    return f"{said}; for noise at half its size {-(-needed // 2) if releases.repeated else needed} are needed"


def _shown_without_noise(releases: Releases, count: int, level: float) -> float:
    """The largest of the bounds that assume nothing of scores if canaries that were drawn are seen without any noise,
    for an average number of them."""
    seen = 1 - (1 - releases.probability) ** releases.rounds
    delta = releases.delta
    if releases.repeated:
        drawn = np.arange(1, count + 1) * seen % 1 < seen  # that share of them, evenly spread
        return repeated_bound(RepeatedScores(drawn.astype(float), np.zeros(count)), delta=delta, significance=level)
    found = [0.0]
    for shifts in (False, True)[: 1 + releases.gaussian]:
        made = planned(count, releases.epsilon, delta, shifts=shifts)
        drawn_in, said_in = count * seen / 2, made - made // 2
        right = min(said_in, drawn_in) + (max(said_in - drawn_in, 0) * (1 - seen) + made // 2) / (2 - seen)
        bound = fdp_bound if shifts else one_run_bound
        found.append(bound(Guesses(count, made, min(made, round(right))), delta=delta, significance=level))
    return max(found)


@lru_cache(maxsize=64)
def planned(canaries: int, epsilon: float, delta: float, *, shifts: bool) -> int:
    """The number of guesses, from the claim alone: for the bound of one run, or for the f-DP bound (`shifts`)."""
    shift = shift_of_epsilon(epsilon, delta=delta) if 0 < epsilon < math.inf else WITHOUT_CLAIM
    bound: Callable[..., float] = fdp_shift_bound if shifts else partial(one_run_bound, delta=delta)
    return planned_number(canaries, shift=shift, bound=bound)
