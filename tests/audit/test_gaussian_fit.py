"""The Gaussian fit, on mechanisms whose epsilon is known exactly."""

from __future__ import annotations

import numpy as np
import pytest

from discreet.audit.canary_scores import CanaryScores, RepeatedScores
from discreet.audit.gaussian_fit import FEWEST, GaussianFit, fit_gaussians
from discreet.audit.gaussian_tradeoff import Normal, epsilon_of_normals, epsilon_of_shift
from tests.audit.made_scores import gaussian_scores, repeated_gaussians

DELTA = 1e-5


@pytest.mark.parametrize("noise", [0.5, 2.085])
def test_the_interval_holds_the_true_epsilon_in_95_percent_of_runs(noise: float) -> None:
    generator, truth = np.random.default_rng(2903), epsilon_of_shift(1 / noise, delta=DELTA)
    fits = [fit_gaussians(gaussian_scores(generator, canaries=500, noise=noise)) for _ in range(200)]
    intervals = [fit.interval(delta=DELTA) for fit in fits if fit.one_spread]
    held = sum(low <= truth <= high for low, high in intervals)
    # 95 % of 200, with a standard deviation of 3.1; the seed is fixed.
    assert len(intervals) >= 197
    assert abs(held - 0.95 * len(intervals)) < 9


def test_the_lower_bound_is_below_the_true_epsilon_in_95_percent_of_runs() -> None:
    generator, truth = np.random.default_rng(311), epsilon_of_shift(1.0, delta=DELTA)
    fits = [fit_gaussians(gaussian_scores(generator, canaries=500, noise=1.0)) for _ in range(200)]
    passed = sum(fit.lower_bound(delta=DELTA) > truth for fit in fits)
    assert 3 <= passed <= 19


def test_a_known_mean_makes_the_interval_narrower_and_keeps_it_right() -> None:
    generator, truth = np.random.default_rng(2905), epsilon_of_shift(0.48, delta=DELTA)
    held, widths = 0, []
    for _ in range(200):
        scores = gaussian_scores(generator, canaries=500, noise=1 / 0.48)
        (low, high), (plain_low, plain_high) = (
            fit_gaussians(CanaryScores(scores.scores, scores.included, centred)).interval(delta=DELTA)
            for centred in (True, False)
        )
        held += low <= truth <= high
        widths.append((high - low) / (plain_high - plain_low))
    assert abs(held - 190) < 9
    assert np.mean(widths) == pytest.approx(0.5**0.5, abs=0.05)  # one mean of two has an error


def test_an_interval_for_a_wrong_scale_of_the_noise_misses_the_truth() -> None:
    generator, truth = np.random.default_rng(5107), epsilon_of_shift(1.0, delta=DELTA)
    fit = fit_gaussians(gaussian_scores(generator, canaries=500, noise=0.5))
    assert fit.interval(delta=DELTA)[0] > truth


def test_the_estimate_nears_the_truth() -> None:
    scores = repeated_gaussians(np.random.default_rng(77), runs=200_000, noise=1.0)
    assert fit_gaussians(scores).epsilon(delta=1e-3) == pytest.approx(3.139, rel=0.01)


@pytest.mark.parametrize("centred", [True, False])
def test_two_spreads_are_told_apart_and_judged_exactly(centred: bool) -> None:
    generator, included = np.random.default_rng(1201), np.arange(1200) % 2 == 0
    truth = epsilon_of_normals(Normal(1.0, 1.5), Normal(0.0, 1.0), delta=DELTA)
    intervals = []
    for _ in range(60):
        scores = np.where(included, generator.normal(1.0, 1.5, size=1200), generator.normal(size=1200))
        fit = fit_gaussians(CanaryScores(scores, included, centred))
        assert not fit.one_spread
        intervals.append(fit.interval(delta=DELTA))
    assert sum(low <= truth <= high for low, high in intervals) >= 51


def test_a_mechanism_that_hides_the_mean_but_not_the_spread_is_found() -> None:
    generator = np.random.default_rng(9)
    fit = fit_gaussians(RepeatedScores(generator.normal(scale=2.0, size=2000), generator.normal(size=2000)))
    assert fit.lower_bound(delta=DELTA) > 5


@pytest.mark.parametrize("kind", ["laplace", "two values"])
def test_scores_that_are_not_gaussian_are_said_to_be(kind: str) -> None:
    generator = np.random.default_rng(40)
    noise = generator.laplace(size=2000) if kind == "laplace" else generator.choice([-1.0, 1.0], size=2000)
    included = generator.random(2000) < 0.5
    assert not fit_gaussians(CanaryScores(noise + included, included)).gaussian
    assert fit_gaussians(CanaryScores(generator.normal(size=2000) + included, included)).gaussian


def test_a_lower_significance_gives_a_lower_bound() -> None:
    fit = GaussianFit(Normal(1.0, 1.0), Normal(0.0, 1.0), (300, 310), gaussian=True)
    bounds = [fit.lower_bound(delta=DELTA, significance=level) for level in (0.05, 0.01, 1e-6)]
    assert bounds[0] > bounds[1] > bounds[2] >= 0


def test_too_few_scores_and_scores_without_noise_are_refused() -> None:
    few = RepeatedScores(np.arange(FEWEST - 1.0), np.arange(100.0))
    with pytest.raises(ValueError, match=f"at least {FEWEST} canaries that were in"):
        fit_gaussians(few)
    with pytest.raises(ValueError, match="there is no noise"):
        fit_gaussians(RepeatedScores(np.arange(100.0), np.zeros(100)))
