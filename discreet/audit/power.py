"""How small a fault an audit is able to find: computed from the settings alone, before anything runs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.optimize import brentq
from scipy.stats import norm

from discreet.audit.gaussian_fit import FEWEST
from discreet.audit.gaussian_tradeoff import shift_of_epsilon
from discreet.audit.verdict import FALSE_ALARM, levels_of

POWER = 0.9  # the share of audits that find it
MOST_CANARIES = 10**7
HALF = 0.5
LEAST_SHARE = 1e-3  # of the noise: with less there is as good as none


@dataclass(frozen=True)
class Releases:
    """What canaries are sent through.

    Attributes:
      rounds: how many releases.
      probability: with which a canary is in the cohort of one.
      noise_multiplier: of each.
      epsilon, delta: what is claimed of all together; epsilon finite and above 0.
      repeated: whether one canary is released again and again, half of the times without it. Then the mean of the
        scores without it is fitted too: of canaries whose directions have random signs it is known to be 0.
    """

    rounds: int
    probability: float
    noise_multiplier: float
    epsilon: float
    delta: float
    repeated: bool = False

    def shift(self, share: float) -> float:
        """By how many standard deviations canaries that are in and out differ if the noise is `share` of its size.

        A canary that is in adds rounds * q of its own length on the average, with the variance rounds * q (1 - q); the
        noise adds rounds * (share * z)^2 to each canary. In is as likely as out, so half of the former counts.
        """
        added, noise = self.rounds * self.probability, self.rounds * (share * self.noise_multiplier) ** 2
        return added / math.sqrt(noise + added * (1 - self.probability) / 2)


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


def outlook(releases: Releases, canaries: int, *, runs: int) -> str:
    """What runs of so many canaries each can find, in words, at the false-alarm rate that a verdict has by default."""
    level = levels_of(releases.rounds, false_alarm=FALSE_ALARM)[-1]
    finds = _finds(releases, canaries * runs, f"{canaries * runs} canaries in all", level)
    needed = canaries_needed(releases, share=HALF, level=level)
    if needed is None:
        return f"{finds}; noise at half its size is not found by any number of canaries"
    return f"{finds}; for noise at half its size {needed} are needed: --runs {-(-needed // canaries)}"


def outlook_of_releases(releases: Releases, count: int) -> str:
    """As `outlook`, of one release that is made again and again: `count` times with the canary, as often without."""
    level = levels_of(0, false_alarm=FALSE_ALARM)[-1]
    finds = _finds(releases, 2 * count, f"{count} releases with the canary and as many without", level)
    needed = canaries_needed(releases, share=HALF, level=level)
    if needed is None:
        return f"{finds}; noise at half its size is not found by any number of them"
    return f"{finds}; for noise at half its size {-(-needed // 2)} are needed: --canaries {-(-needed // 2)}"


def _finds(releases: Releases, canaries: int, many: str, level: float) -> str:
    if canaries < 3 * FEWEST:
        return f"{many} are too few for the Gaussian fit, which needs {3 * FEWEST}"
    found = smallest_fault(releases, canaries, level=level)
    if found is None:
        return f"in nine of ten audits {many} refute a claim if there is no noise at all, but not for less"
    return f"in nine of ten audits {many} refute a claim if noise has {found:.0%} of its size or less"
