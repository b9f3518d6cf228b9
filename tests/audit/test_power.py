"""What an audit can find is said before it runs, and met by audits of made scores."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from discreet.audit.canary_scores import Claim, Releases, Scores
from discreet.audit.gaussian_fit import epsilon_of_shift, fit_gaussians
from discreet.audit.lower_bounds import guess, one_run_bound, planned
from discreet.audit.power import power_of, smallest_fault
from tests.audit.made import repeated_gaussians

DELTA, LEVEL = 1e-3, 0.01 / 3
ONE_ROUND = Releases(1, 1.0, 1.0, Claim(epsilon_of_shift(1.0, delta=DELTA), DELTA, ""))
REPEATED = replace(ONE_ROUND, repeated=True)


def drawn(generator: np.random.Generator, releases: Releases, canaries: int, share: float) -> Scores:
    """The inner products of canaries with the sum of so many sampled rounds."""
    included = generator.random(canaries) < 0.5
    often = generator.binomial(releases.rounds, releases.probability, canaries) * included
    noise = share * (releases.noise_multiplier or 1.0) * math.sqrt(releases.rounds)
    return Scores(often + noise * generator.normal(size=canaries), included, centred=True)


def test_with_sampling_the_shift_is_that_of_drawn_scores() -> None:
    releases = Releases(20, 0.3, 1.5, ONE_ROUND.claim)
    found = drawn(np.random.default_rng(61), releases, 200_000, 0.5)
    pooled = math.sqrt((found.seen.var() + found.unseen.var()) / 2)
    assert releases.shift(0.5) == pytest.approx(found.seen.mean() / pooled, rel=0.01)  # a standard error of 0.4 %


@pytest.mark.parametrize(("releases", "count"), [(ONE_ROUND, 100), (ONE_ROUND, 1000), (REPEATED, 1000)])
def test_nine_of_ten_audits_find_the_smallest_fault(releases: Releases, count: int) -> None:
    share, generator, found = smallest_fault(releases, count, level=LEVEL), np.random.default_rng(67), 0
    assert share is not None
    for _ in range(200):
        once = repeated_gaussians(generator, runs=count // 2, noise=share)
        fit = fit_gaussians(once if releases.repeated else drawn(generator, releases, count, share))
        found += fit is not None and fit.lower_bound(delta=DELTA, significance=LEVEL) > releases.claim.epsilon
    assert 165 <= found <= 195  # of 180, with a standard deviation of 4; the seed is fixed


@pytest.mark.parametrize("rounds", [1, 20])
def test_without_noise_guesses_at_sampled_canaries_show_what_is_said(rounds: int) -> None:
    sampled = Releases(rounds, 0.1, None, Claim(0.4, DELTA, ""))
    said = re.search(r"show epsilon (\S+) on average", power_of(sampled, 2000, level=LEVEL)[0])
    assert said is not None
    made, generator = planned(2000, 0.4, DELTA, shifts=False), np.random.default_rng(73)
    shown = [
        one_run_bound(guess(drawn(generator, sampled, 2000, 1e-9), made=made), delta=DELTA, significance=LEVEL)
        for _ in range(20)
    ]
    assert float(said[1]) == pytest.approx(np.mean(shown), abs=0.06)
