"""The Gaussian fit, on mechanisms whose epsilon is known exactly."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian
from scipy.stats import norm

from discreet.audit.canary_scores import Scores
from discreet.audit.gaussian_fit import (
    GaussianFit,
    Normal,
    delta_of_normals,
    epsilon_of_normals,
    epsilon_of_shift,
    fit_gaussians,
    shift_of_epsilon,
)
from tests.audit.made import gaussian_scores, repeated_scores

DELTA = 1e-5
PAIRS = [
    (Normal(1.0, 1.3), Normal(0.0, 1.0)),
    (Normal(1.0, 0.7), Normal(0.0, 1.0)),
    (Normal(0.0, 2.0), Normal(0.0, 1.0)),
    (Normal(-3.0, 0.2), Normal(-3.1, 0.21)),
]


@pytest.mark.parametrize(("one", "other"), PAIRS)
@pytest.mark.parametrize("epsilon", [0.0, 3.0])
def test_delta_is_the_integral_of_what_passes_e_to_the_epsilon(one: Normal, other: Normal, epsilon: float) -> None:
    wide = 12 * max(one.spread, other.spread)
    at, step = np.linspace(one.mean - wide, one.mean + wide, 400_001, retstep=True)
    excess = norm.pdf(at, one.mean, one.spread) - math.exp(epsilon) * norm.pdf(at, other.mean, other.spread)
    integral = float(np.maximum(excess, 0).sum() * step)
    assert delta_of_normals(one, other, epsilon) == pytest.approx(integral, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(("shift", "delta"), [(0.1, 1e-5), (1.0, 1e-2), (4.0, 1e-9)])
def test_with_spreads_that_hardly_differ_it_is_the_gaussian_mechanism(shift: float, delta: float) -> None:
    found = epsilon_of_normals(Normal(7 * shift, 7.0), Normal(0.0, 7.0 * (1 + 1e-9)), delta=delta)
    assert found == pytest.approx(get_epsilon_gaussian(1 / shift, delta), rel=1e-5, abs=1e-7)
    assert shift_of_epsilon(epsilon_of_shift(shift, delta=delta), delta=delta) == pytest.approx(shift, rel=1e-6)


@pytest.mark.parametrize("noise", [0.5, 2.085])
def test_the_interval_holds_the_true_epsilon_in_95_percent_of_runs(noise: float) -> None:
    generator, truth = np.random.default_rng(2903), epsilon_of_shift(1 / noise, delta=DELTA)
    fits = [fit_gaussians(gaussian_scores(generator, canaries=500, noise=noise)) for _ in range(200)]
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
        scores = np.where(included, generator.normal(1.0, 1.5, size=1200), generator.normal(size=1200))
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
    noise = generator.laplace(size=2000) if kind == "laplace" else generator.choice([-1.0, 1.0], size=2000)
    included = generator.random(2000) < 0.5
    assert fit_gaussians(Scores(noise + included, included)) is None
    assert fit_gaussians(Scores(generator.normal(size=2000) + included, included)) is not None
