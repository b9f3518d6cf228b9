"""Epsilon of two Gaussians, against numerical integration, dp_accounting and numbers that Google published."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian
from scipy.stats import norm

from discreet.audit.gaussian_tradeoff import (
    Normal,
    delta_of_normals,
    epsilon_of_normals,
    epsilon_of_shift,
    shift_of_epsilon,
)

PAIRS = [
    (Normal(1.0, 1.0), Normal(0.0, 1.0)),
    (Normal(1.0, 1.3), Normal(0.0, 1.0)),
    (Normal(1.0, 0.7), Normal(0.0, 1.0)),
    (Normal(0.0, 2.0), Normal(0.0, 1.0)),
    (Normal(-3.0, 0.2), Normal(-3.1, 0.21)),
]


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=str)
@pytest.mark.parametrize("epsilon", [0.0, 0.5, 3.0])
def test_delta_is_the_integral_of_what_passes_e_to_the_epsilon(one: Normal, other: Normal, epsilon: float) -> None:
    wide = 12 * max(one.spread, other.spread)
    at, step = np.linspace(one.mean - wide, one.mean + wide, 2_000_001, retstep=True)
    excess = norm.pdf(at, one.mean, one.spread) - math.exp(epsilon) * norm.pdf(at, other.mean, other.spread)
    integral = float(np.maximum(excess, 0).sum() * step)
    assert delta_of_normals(one, other, epsilon) == pytest.approx(integral, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("shift", [0.1, 0.48, 1.0, 4.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-9])
def test_with_one_spread_it_is_the_gaussian_mechanism(shift: float, delta: float) -> None:
    # dp_accounting has its own solution of the same equation.
    for spread in (1.0, 1.0 + 1e-9):
        found = epsilon_of_normals(Normal(7 * shift, 7.0), Normal(0.0, 7.0 * spread), delta=delta)
        assert found == pytest.approx(get_epsilon_gaussian(1 / shift, delta), rel=1e-5, abs=1e-7)
    assert epsilon_of_shift(shift, delta=delta) == pytest.approx(get_epsilon_gaussian(1 / shift, delta), abs=1e-8)


def test_the_number_that_one_shot_epe_tests() -> None:
    # google-research/federated, one_shot_epe, test_closed_form_null_gaussian_alt_regression, high_dim.
    spread = 2000**-0.5
    assert epsilon_of_normals(Normal(spread, spread), Normal(0.0, spread), delta=1e-2) == pytest.approx(2.317789)


def test_epsilon_is_the_same_both_ways_and_under_a_change_of_units() -> None:
    one, other = Normal(1.0, 1.3), Normal(0.1, 0.9)
    first = epsilon_of_normals(one, other, delta=1e-5)
    moved = [Normal(3 + 2.7 * each.mean, 2.7 * each.spread) for each in (other, one)]
    assert epsilon_of_normals(*moved, delta=1e-5) == pytest.approx(first)


def test_scores_that_differ_only_in_their_spread_cost_something() -> None:
    assert epsilon_of_normals(Normal(0.0, 1.2), Normal(0.0, 1.0), delta=1e-5) > 1


def test_equal_gaussians_have_epsilon_zero() -> None:
    assert epsilon_of_normals(Normal(1.0, 2.0), Normal(1.0, 2.0), delta=1e-9) == 0
    assert epsilon_of_shift(-1.0, delta=1e-5) == 0


def test_no_spread_beside_the_distance_is_an_infinite_epsilon() -> None:
    assert epsilon_of_normals(Normal(1.0, 1e-4), Normal(0.0, 1e-4), delta=1e-5) == math.inf


def test_shift_and_epsilon_are_inverse() -> None:
    for epsilon in (0.1, 2.0, 30.0):
        assert epsilon_of_shift(shift_of_epsilon(epsilon, delta=1e-5), delta=1e-5) == pytest.approx(epsilon, rel=1e-6)
