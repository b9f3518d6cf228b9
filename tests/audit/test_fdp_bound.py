"""The bound of Mahloujifar, Melis and Chaudhuri, against jax_privacy and Gaussian mechanisms."""

from __future__ import annotations

import numpy as np
import pytest

from discreet.audit.fdp_bound import MOST_SHIFT, fdp_bound, fdp_shift_bound, least_probability
from discreet.audit.gaussian_tradeoff import epsilon_of_shift
from discreet.audit.guesses import Guesses, guess
from discreet.audit.one_run_bound import one_run_bound
from tests.audit.made_scores import gaussian_scores

# What google-deepmind/jax_privacy's auditing._epsilon_one_run_fdp finds at significance 0.05.
PEER = [
    ((1000, 100, 90, 1e-5), 2.4564051),
    ((2000, 400, 280, 1e-5), 1.0154924),
    ((2000, 1, 1, 1e-5), 0.0),
    ((2000, 2000, 1200, 1e-3), 0.3753095),
    ((2000, 300, 299, 1e-5), 6.7139235),
    ((100, 100, 100, 1e-3), 6.1486320),
    ((5000, 900, 700, 1e-6), 1.8563027),
]


@pytest.mark.parametrize(("given", "peer"), PEER)
def test_the_bound_is_that_of_jax_privacy(given: tuple[int, int, int, float], peer: float) -> None:
    assert fdp_bound(Guesses(*given[:3]), delta=given[3]) == pytest.approx(peer, abs=2e-6)


@pytest.mark.parametrize(("shift", "made"), [(0.48, 245), (1.0, 207)])
def test_for_gaussian_noise_it_passes_the_truth_in_at_most_5_percent_of_runs(shift: float, made: int) -> None:
    generator = np.random.default_rng(1620)
    bounds = [
        fdp_shift_bound(guess(gaussian_scores(generator, canaries=2000, noise=1 / shift), made=made))
        for _ in range(200)
    ]
    # 5 % of 200 is 10, with a standard deviation of 3; the seed is fixed.
    assert sum(bound > shift for bound in bounds) <= 10
    assert np.mean(bounds) > 0.5 * shift


def test_noise_at_half_its_size_is_found() -> None:
    scores = gaussian_scores(np.random.default_rng(1621), canaries=2000, noise=0.5)
    assert fdp_bound(guess(scores, made=207), delta=1e-3) > epsilon_of_shift(1.0, delta=1e-3)


def test_it_is_above_the_bound_that_knows_only_epsilon_and_delta() -> None:
    scores = gaussian_scores(np.random.default_rng(1622), canaries=2000, noise=1.0)
    found = guess(scores, made=207)
    assert fdp_bound(found, delta=1e-5) > one_run_bound(found, delta=1e-5)


def test_a_mechanism_that_tells_nothing_cannot_be_guessed_often() -> None:
    # Without privacy loss, guesses are coins: nine of ten and more has probability 11 / 1024 (ten or nine).
    assert least_probability(Guesses(10, 10, 9), shift=0.0, level=0.011) > 1
    assert fdp_shift_bound(Guesses(10, 10, 5)) == 0


def test_a_shift_beyond_all_measure_is_cut_off() -> None:
    assert fdp_shift_bound(Guesses(10**6, 10**6, 10**6), significance=1 - 1e-9) <= MOST_SHIFT
