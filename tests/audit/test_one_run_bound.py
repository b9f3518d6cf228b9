"""The bound of Steinke, Nasr and Jagielski, against jax_privacy and mechanisms with a known epsilon."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom

from discreet.audit.gaussian_tradeoff import epsilon_of_shift
from discreet.audit.guesses import Guesses, guess
from discreet.audit.one_run_bound import one_run_bound, one_run_p_value
from tests.audit.made_scores import gaussian_scores, randomised_responses

# What google-deepmind/jax_privacy's auditing._epsilon_one_run finds at significance 0.05.
PEER = [
    ((1000, 100, 90, 1e-5), 1.6261437),
    ((2000, 400, 280, 1e-5), 0.6621238),
    ((2000, 1, 1, 1e-5), 0.0),
    ((2000, 2000, 1200, 1e-3), 0.2915597),
    ((2000, 300, 299, 1e-5), 4.1052919),
    ((100, 100, 100, 1e-3), 3.2023037),
    ((5000, 900, 700, 1e-6), 1.1186309),
]


@pytest.mark.parametrize(("given", "peer"), PEER)
def test_the_bound_is_that_of_jax_privacy(given: tuple[int, int, int, float], peer: float) -> None:
    assert one_run_bound(Guesses(*given[:3]), delta=given[3]) == pytest.approx(peer, abs=2e-6)


@pytest.mark.parametrize("delta", [1e-6, 1e-3])
def test_the_p_value_is_the_theorem_written_out(delta: float) -> None:
    epsilon, (m, r, v) = 0.7, (300, 40, 31)
    success = np.exp(epsilon) / (1 + np.exp(epsilon))
    tail = sum(binom.pmf(w, r, success) for w in range(v, r + 1))
    most = max(sum(binom.pmf(w, r, success) for w in range(v - i, v)) / i for i in range(1, v + 1))
    found = one_run_p_value(Guesses(m, r, v), epsilon=epsilon, delta=delta)
    assert found == pytest.approx(tail + 2 * m * delta * most)


def test_for_randomised_response_it_passes_the_truth_as_often_as_it_may() -> None:
    generator, passed = np.random.default_rng(118), 0
    for _ in range(400):
        scores = randomised_responses(generator, canaries=500, epsilon=1.0)
        passed += one_run_p_value(guess(scores, made=500), epsilon=1.0, delta=1e-12) < 0.05
    # 5 % of 400 is 20; counts are whole, so that a little less is used. A bound that gives room away passes never.
    assert 6 <= passed <= 24


def test_for_gaussian_noise_it_stays_below_the_truth() -> None:
    generator, truth = np.random.default_rng(90), epsilon_of_shift(0.48, delta=1e-5)
    bounds = [
        one_run_bound(guess(gaussian_scores(generator, canaries=2000, noise=1 / 0.48), made=155), delta=1e-5)
        for _ in range(100)
    ]
    assert sum(bound > truth for bound in bounds) <= 5
    assert 0.6 < np.mean(bounds) < 0.9  # of 1.90: what one run can show


def test_claims_that_are_far_too_small_are_found() -> None:
    scores = gaussian_scores(np.random.default_rng(91), canaries=2000, noise=0.25)
    assert one_run_bound(guess(scores, made=300), delta=1e-5) > 3.5


def test_no_correct_guess_shows_nothing() -> None:
    assert one_run_p_value(Guesses(10, 10, 0), epsilon=0.0, delta=1e-5) == 1
    assert one_run_bound(Guesses(10, 10, 0), delta=1e-5) == 0
