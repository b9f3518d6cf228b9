"""The distribution-free bound from repeated runs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binomtest

from discreet.audit.canary_scores import RepeatedScores
from discreet.audit.gaussian_tradeoff import epsilon_of_shift
from discreet.audit.repeated_bound import repeated_bound
from tests.audit.made_scores import repeated_gaussians


def test_the_rates_have_clopper_pearson_limits() -> None:
    # Two values only, so that the threshold is known: 10 of 100 are told wrongly among the in, 5 of 100 among the out.
    seen = np.concatenate([np.ones(180), np.zeros(20)])
    unseen = np.concatenate([np.ones(10), np.zeros(190)])
    found = repeated_bound(RepeatedScores(seen, unseen), delta=1e-3)
    missed, false = (binomtest(count, 100).proportion_ci(0.95, method="exact").high for count in (10, 5))
    expected = max(math.log((1 - 1e-3 - missed) / false), math.log((1 - 1e-3 - false) / missed))
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(("noise", "by_hand"), [(1.0, 2.09), (0.5, 4.35)])
def test_it_meets_the_numbers_that_were_measured_by_hand(noise: float, by_hand: float) -> None:
    # 30,000 runs a world at delta 1e-3, whose ledger says 3.139 and 7.581.
    scores = repeated_gaussians(np.random.default_rng(21), runs=30_000, noise=noise)
    assert repeated_bound(scores, delta=1e-3) == pytest.approx(by_hand, rel=0.2)


def test_it_passes_the_truth_in_at_most_5_percent_of_audits() -> None:
    # A mechanism that tells the coin truly with probability 3/4, so (log 3, 0)-DP: a threshold is its best attack.
    generator, passed = np.random.default_rng(56), 0
    for _ in range(400):
        seen, unseen = (generator.random(400) < share for share in (0.75, 0.25))
        passed += repeated_bound(RepeatedScores(seen.astype(float), unseen.astype(float)), delta=1e-9) > math.log(3)
    assert passed <= 20


def test_noise_at_half_its_size_is_found() -> None:
    scores = repeated_gaussians(np.random.default_rng(22), runs=30_000, noise=0.5)
    assert repeated_bound(scores, delta=1e-3) > epsilon_of_shift(1.0, delta=1e-3)


def test_the_way_in_which_only_a_low_score_tells_is_found_too() -> None:
    # Without the canary a run is known for sure in half of the cases; with it, almost never.
    scores = RepeatedScores(np.ones(2000), np.concatenate([np.zeros(1000), np.ones(1000)])[np.arange(2000) * 7 % 2000])
    assert repeated_bound(scores, delta=1e-5) > 4


def test_scores_that_tell_nothing_show_nothing() -> None:
    generator = np.random.default_rng(23)
    assert repeated_bound(RepeatedScores(generator.normal(size=500), generator.normal(size=500)), delta=1e-5) < 0.2
    assert repeated_bound(RepeatedScores(np.ones(1), np.zeros(1)), delta=1e-5) == 0
