"""The smallest fault that an audit is able to find: computed from the settings alone, before anything runs."""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np
from scipy.optimize import brentq
from scipy.stats import norm

from discreet.audit.canary_scores import Releases, Scores
from discreet.audit.gaussian_fit import FEWEST, shift_of_epsilon
from discreet.audit.lower_bounds import Guesses, fdp_bound, one_run_bound, planned, repeated_bound

POWER = 0.9  # the share of audits that find it
ENOUGH = 3 * FEWEST  # scores: with fewer the coins too often leave less than `FEWEST` of a kind
MOST_CANARIES = 10**7
HALF = 0.5
LEAST_SHARE = 1e-3  # of the noise: with less there is as good as none


def power_of(releases: Releases, count: int, *, level: float) -> tuple[str, bool]:
    """The faults that an audit is able to find whose bounds have this level, in words, and true if there are any.

    `count`: the canaries of all runs together; if one is released again and again, how often with it, and as often
    without.
    """
    claimed = releases.claim.epsilon
    if not claimed < math.inf:
        return "it could have found nothing: there is no claim", False
    many = f"{count} releases with the canary and as many without" if releases.repeated else f"{count} canaries"
    scores = 2 * count if releases.repeated else count
    fitted = _fitted(releases, scores, level)
    few = f"; they are too few for the Gaussian fit, which needs {ENOUGH}" if scores < ENOUGH else ""
    shown = _shown_without_noise(releases, count, level)
    without = f"without any noise {many} show epsilon {shown:.3g} on average, and {claimed:.4g} is claimed"
    if not fitted and shown <= claimed:
        return f"it could have found nothing: even {without}{few}", False
    return f"what it could have found: {without}{fitted or few}", True


def _fitted(releases: Releases, canaries: int, level: float) -> str:
    """The faults that the Gaussian fit finds, in words; empty if there are none."""
    share = smallest_fault(releases, canaries, level=level)
    if share is None:
        return ""
    numbers = range(ENOUGH, MOST_CANARIES + 1)
    needed = bisect_left(numbers, True, key=lambda number: _excess(releases, HALF, number, level) > 0)
    said = f"; in nine of ten audits they refute the claim if noise has {share:.0%} of its size or less; "
    if needed == len(numbers):
        return f"{said}noise at half its size is not found by any number of them"
    return f"{said}for noise at half its size {-(-numbers[needed] // (1 + releases.repeated))} are needed"


def smallest_fault(releases: Releases, canaries: int, *, level: float) -> float | None:
    """The share of its size, within (0, 1], that noise may have left to be found in nine of ten audits by the Gaussian
    fit; None if not even noise that is gone would be. `level`: of the fit's lower bound, one-sided."""

    def excess(share: float) -> float:
        return _excess(releases, share, canaries, level)

    if releases.noise_multiplier is None or canaries < ENOUGH or excess(LEAST_SHARE) <= 0:
        return None
    return float(brentq(excess, LEAST_SHARE, 1.0, xtol=1e-6)) if excess(1.0) < 0 else 1.0


def _excess(releases: Releases, share: float, canaries: int, level: float) -> float:
    """Above 0 if nine of ten fits pass the claim by so much that the claim is refuted."""
    claimed, true = shift_of_epsilon(releases.claim.epsilon, delta=releases.claim.delta), releases.shift(share)
    # The errors of fitted shifts, half of the canaries being out: `GaussianFit.interval`.
    of_claimed, of_true = (
        math.sqrt((4 if releases.repeated else 2) / canaries + shift**2 / (2 * canaries)) for shift in (claimed, true)
    )
    return float(true - norm.isf(1 - POWER) * of_true - claimed - norm.isf(level) * of_claimed)


def _shown_without_noise(releases: Releases, count: int, level: float) -> float:
    """The largest of the bounds that assume nothing of scores if canaries that were drawn are seen without any noise,
    for an average number of them."""
    seen, claim = 1 - (1 - releases.probability) ** releases.rounds, releases.claim
    if releases.repeated:
        drawn = np.arange(1, count + 1) * seen % 1 < seen  # that share of them, evenly spread
        scores = Scores(np.concatenate([drawn.astype(float), np.zeros(count)]), np.arange(2 * count) < count)
        return repeated_bound(scores, delta=claim.delta, significance=level)
    found = []
    for shifts in (False,) if releases.noise_multiplier is None else (False, True):
        made = planned(count, claim.epsilon, claim.delta, shifts=shifts)
        drawn_in, said_in = count * seen / 2, made - made // 2
        right = min(said_in, drawn_in) + (max(said_in - drawn_in, 0) * (1 - seen) + made // 2) / (2 - seen)
        guesses, bound = Guesses(count, made, min(made, round(right))), fdp_bound if shifts else one_run_bound
        found.append(bound(guesses, delta=claim.delta, significance=level))
    return max(found)
