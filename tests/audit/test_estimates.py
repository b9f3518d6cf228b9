"""Lower bounds of epsilon and the Gaussian fit, against jax_privacy and mechanisms whose epsilon is
known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian
from scipy.stats import binomtest, norm

from discreet.audit.canaries import Scores
from discreet.audit.estimates import (
    GaussianFit,
    Guesses,
    Normal,
    delta_of_normals,
    epsilon_of_normals,
    epsilon_of_shift,
    fdp_bound,
    fdp_shift_bound,
    fit_gaussians,
    guess_membership,
    one_run_bound,
    one_run_p_value,
    repeated_bound,
    shift_of_epsilon,
)
from tests.audit.made import gaussian_scores, randomised_responses, repeated_scores

# google-deepmind/jax_privacy: auditing._epsilon_one_run and _epsilon_one_run_fdp at significance
# 0.05.
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
def test_the_bounds_are_those_of_jax_privacy(
    given: tuple[int, int, int, float], one_run: float, fdp: float
) -> None:
    *counts, delta = given
    assert one_run_bound(Guesses(*counts), delta=delta) == pytest.approx(one_run, abs=2e-6)
    assert fdp_bound(Guesses(*counts), delta=delta) == pytest.approx(fdp, abs=2e-6)


def test_for_randomised_response_it_passes_the_truth_as_often_as_it_may() -> None:
    generator, passed = np.random.default_rng(118), 0
    for _ in range(400):
        scores = randomised_responses(generator, canaries=500, epsilon=1.0)
        passed += (
            one_run_p_value(guess_membership(scores, made=500), epsilon=1.0, delta=1e-12) < 0.05
        )
    # 5 % of 400 is 20; counts are whole, so that a little less is used. A bound that gives room
    # away passes never.
    assert 6 <= passed <= 24


@pytest.mark.parametrize(("shift", "made"), [(0.48, 245), (1.0, 207)])
def test_for_gaussian_noise_the_fdp_bound_exceeds_the_truth_in_at_most_5_percent(
    shift: float, made: int
) -> None:
    generator = np.random.default_rng(1620)
    bounds = [
        fdp_shift_bound(
            guess_membership(gaussian_scores(generator, canaries=2000, noise=1 / shift), made=made)
        )
        for _ in range(200)
    ]
    # 5 % of 200 is 10, with a standard deviation of 3; the seed is fixed.
    assert sum(bound > shift for bound in bounds) <= 10
    assert np.mean(bounds) > 0.5 * shift


@pytest.mark.parametrize(("made", "correct"), [(1, 1), (2, 2), (3, 2), (4, 2), (5, 3)])
def test_the_ends_of_the_order_are_guessed(made: int, correct: int) -> None:
    # By hand: in order -7 (out), -2 (in), 0.1 (in), 3 (out), 5 (in).
    scores = Scores(
        np.array([3.0, -2.0, 0.1, 5.0, -7.0]), np.array([False, True, True, True, False])
    )
    assert guess_membership(scores, made=made) == Guesses(5, made, correct)


def test_the_rates_of_repeated_scores_have_clopper_pearson_limits() -> None:
    # Two values only, so that the threshold is known: 10 of 100 are told wrongly among the in, 5 of
    # 100 among the out.
    seen = np.concatenate([np.ones(180), np.zeros(20)])
    unseen = np.concatenate([np.ones(10), np.zeros(190)])
    missed, false = (
        binomtest(count, 100).proportion_ci(0.95, method="exact").high for count in (10, 5)
    )
    expected = max(math.log((1 - 1e-3 - missed) / false), math.log((1 - 1e-3 - false) / missed))
    assert repeated_bound(repeated_scores(seen, unseen), delta=1e-3) == pytest.approx(expected)


def test_of_repeated_scores_it_passes_the_truth_in_at_most_5_percent_of_audits() -> None:
    # A mechanism that tells the coin truly with probability 3/4, so (log 3, 0)-DP: a threshold is
    # its best attack.
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


DELTA = 1e-5
PAIRS = [
    (Normal(1.0, 1.3), Normal(0.0, 1.0)),
    (Normal(1.0, 0.7), Normal(0.0, 1.0)),
    (Normal(0.0, 2.0), Normal(0.0, 1.0)),
    (Normal(-3.0, 0.2), Normal(-3.1, 0.21)),
]


@pytest.mark.parametrize(("one", "other"), PAIRS)
@pytest.mark.parametrize("epsilon", [0.0, 3.0])
def test_delta_is_the_integral_of_what_passes_e_to_the_epsilon(
    one: Normal, other: Normal, epsilon: float
) -> None:
    wide = 12 * max(one.spread, other.spread)
    at, step = np.linspace(one.mean - wide, one.mean + wide, 400_001, retstep=True)
    excess = norm.pdf(at, one.mean, one.spread) - math.exp(epsilon) * norm.pdf(
        at, other.mean, other.spread
    )
    integral = float(np.maximum(excess, 0).sum() * step)
    assert delta_of_normals(one, other, epsilon) == pytest.approx(integral, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(("shift", "delta"), [(0.1, 1e-5), (1.0, 1e-2), (4.0, 1e-9)])
def test_with_spreads_that_hardly_differ_it_is_the_gaussian_mechanism(
    shift: float, delta: float
) -> None:
    found = epsilon_of_normals(Normal(7 * shift, 7.0), Normal(0.0, 7.0 * (1 + 1e-9)), delta=delta)
    assert found == pytest.approx(get_epsilon_gaussian(1 / shift, delta), rel=1e-5, abs=1e-7)
    assert shift_of_epsilon(epsilon_of_shift(shift, delta=delta), delta=delta) == pytest.approx(
        shift, rel=1e-6
    )


@pytest.mark.parametrize("noise", [0.5, 2.085])
def test_the_interval_holds_the_true_epsilon_in_95_percent_of_runs(noise: float) -> None:
    generator, truth = np.random.default_rng(2903), epsilon_of_shift(1 / noise, delta=DELTA)
    fits = [
        fit_gaussians(gaussian_scores(generator, canaries=500, noise=noise)) for _ in range(200)
    ]
    intervals = [fit.interval(delta=DELTA) for fit in fits if fit is not None and fit.one_spread]
    held = sum(low <= truth <= high for low, high in intervals)
    # 95 % of 200, with a standard deviation of 3.1; the seed is fixed.
    assert len(intervals) >= 197
    assert abs(held - 0.95 * len(intervals)) < 9


def fitted(scores: Scores) -> GaussianFit:
    fit = fit_gaussians(scores)
    assert fit is not None
    return fit


@pytest.mark.parametrize("centred", [True, False])
def test_two_spreads_are_told_apart_and_judged_exactly(centred: bool) -> None:
    generator, included = np.random.default_rng(1201), np.arange(1200) % 2 == 0
    truth = epsilon_of_normals(Normal(1.0, 1.5), Normal(0.0, 1.0), delta=DELTA)
    intervals = []
    for _ in range(60):
        scores = np.where(
            included, generator.normal(1.0, 1.5, size=1200), generator.normal(size=1200)
        )
        fit = fitted(Scores(scores, included, centred))
        assert not fit.one_spread
        intervals.append(fit.interval(delta=DELTA))
    assert sum(low <= truth <= high for low, high in intervals) >= 51


def test_a_mechanism_that_hides_the_mean_but_not_the_spread_is_found() -> None:
    generator = np.random.default_rng(9)
    scores = repeated_scores(generator.normal(scale=2.0, size=2000), generator.normal(size=2000))
    assert fitted(scores).lower_bound(delta=DELTA) > 5


@pytest.mark.parametrize("kind", ["laplace", "two values"])
def test_scores_that_are_not_gaussian_are_not_fitted(kind: str) -> None:
    generator = np.random.default_rng(40)
    noise = (
        generator.laplace(size=2000)
        if kind == "laplace"
        else generator.choice([-1.0, 1.0], size=2000)
    )
    included = generator.random(2000) < 0.5
    assert fit_gaussians(Scores(noise + included, included)) is None
    assert fit_gaussians(Scores(generator.normal(size=2000) + included, included)) is not None
