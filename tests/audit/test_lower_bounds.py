"""Lower bounds of epsilon, against jax_privacy and mechanisms whose epsilon is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binomtest

from discreet.audit.canary_scores import Scores
from discreet.audit.lower_bounds import (
    Guesses,
    fdp_bound,
    fdp_shift_bound,
    guess,
    one_run_bound,
    one_run_p_value,
    repeated_bound,
)
from tests.audit.made import gaussian_scores, randomised_responses, repeated_scores

# google-deepmind/jax_privacy: auditing._epsilon_one_run and _epsilon_one_run_fdp at significance 0.05.
PEER = [
    ((1000, 100, 90, 1e-5), 1.6261437, 2.4564051),
    ((2000, 400, 280, 1e-5), 0.6621238, 1.0154924),
    ((2000, 1, 1, 1e-5), 0.0, 0.0),
    ((2000, 2000, 1200, 1e-3), 0.2915597, 0.3753095),
    ((2000, 300, 299, 1e-5), 4.1052919, 6.7139235),
    ((100, 100, 100, 1e-3), 3.2023037, 6.1486320),
    ((5000, 900, 700, 1e-6), 1.1186309, 1.8563027),
]


@pytest.mark.parametrize(("given", "one_run", "fdp"), PEER)
def test_the_bounds_are_those_of_jax_privacy(given: tuple[int, int, int, float], one_run: float, fdp: float) -> None:
    *counts, delta = given
    assert one_run_bound(Guesses(*counts), delta=delta) == pytest.approx(one_run, abs=2e-6)
    assert fdp_bound(Guesses(*counts), delta=delta) == pytest.approx(fdp, abs=2e-6)


def test_for_randomised_response_it_passes_the_truth_as_often_as_it_may() -> None:
    generator, passed = np.random.default_rng(118), 0
    for _ in range(400):
        scores = randomised_responses(generator, canaries=500, epsilon=1.0)
        passed += one_run_p_value(guess(scores, made=500), epsilon=1.0, delta=1e-12) < 0.05
    # 5 % of 400 is 20; counts are whole, so that a little less is used. A bound that gives room away passes never.
    assert 6 <= passed <= 24


@pytest.mark.parametrize(("shift", "made"), [(0.48, 245), (1.0, 207)])
def test_for_gaussian_noise_the_fdp_bound_passes_the_truth_in_at_most_5_percent_of_runs(
    shift: float, made: int
) -> None:
    generator = np.random.default_rng(1620)
    bounds = [
        fdp_shift_bound(guess(gaussian_scores(generator, canaries=2000, noise=1 / shift), made=made))
        for _ in range(200)
    ]
    # 5 % of 200 is 10, with a standard deviation of 3; the seed is fixed.
    assert sum(bound > shift for bound in bounds) <= 10
    assert np.mean(bounds) > 0.5 * shift


@pytest.mark.parametrize(("made", "correct"), [(1, 1), (2, 2), (3, 2), (4, 2), (5, 3)])
def test_the_ends_of_the_order_are_guessed(made: int, correct: int) -> None:
    # By hand: in order -7 (out), -2 (in), 0.1 (in), 3 (out), 5 (in).
    scores = Scores(np.array([3.0, -2.0, 0.1, 5.0, -7.0]), np.array([False, True, True, True, False]))
    assert guess(scores, made=made) == Guesses(5, made, correct)


def test_the_rates_of_repeated_scores_have_clopper_pearson_limits() -> None:
    # Two values only, so that the threshold is known: 10 of 100 are told wrongly among the in, 5 of 100 among the out.
    seen = np.concatenate([np.ones(180), np.zeros(20)])
    unseen = np.concatenate([np.ones(10), np.zeros(190)])
    missed, false = (binomtest(count, 100).proportion_ci(0.95, method="exact").high for count in (10, 5))
    expected = max(math.log((1 - 1e-3 - missed) / false), math.log((1 - 1e-3 - false) / missed))
    assert repeated_bound(repeated_scores(seen, unseen), delta=1e-3) == pytest.approx(expected)


def test_of_repeated_scores_it_passes_the_truth_in_at_most_5_percent_of_audits() -> None:
    # A mechanism that tells the coin truly with probability 3/4, so (log 3, 0)-DP: a threshold is its best attack.
    generator, passed = np.random.default_rng(56), 0
    for _ in range(400):
        seen, unseen = (generator.random(400) < share for share in (0.75, 0.25))
        scores = repeated_scores(seen.astype(float), unseen.astype(float))
        passed += repeated_bound(scores, delta=1e-9) > math.log(3)
    assert passed <= 20


def test_the_way_in_which_only_a_low_score_tells_is_found_too() -> None:
    # Without the canary a run is known for sure in half of the cases; with it, almost never.
    unseen = np.concatenate([np.zeros(1000), np.ones(1000)])[np.arange(2000) * 7 % 2000]
    assert repeated_bound(repeated_scores(np.ones(2000), unseen), delta=1e-5) > 4
