from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from dp_accounting import DpEvent, GaussianDpEvent, LaplaceDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from scipy.stats import norm

from discreet.accounting.loss_distribution import FINEST_INTERVAL, composed_epsilon, loss_masses

SAMPLED = PoissonSampledDpEvent(0.1, GaussianDpEvent(1.3))


def sampled_gaussian_delta(epsilon: float, q: float, noise: float) -> float:
    """The larger delta of one Poisson-sampled Gaussian release, removing and adding (Zhu et al. 2022)."""
    cut = noise**2 * math.log(math.expm1(epsilon) / q + 1) + 0.5
    removed = q * norm.sf((cut - 1) / noise) + (1 - q - math.exp(epsilon)) * norm.sf(cut / noise)
    if epsilon >= -math.log1p(-q):
        return float(removed)
    cut = noise**2 * math.log(math.expm1(-epsilon) / q + 1) + 0.5
    lower = q * norm.cdf((cut - 1) / noise) + (1 - q) * norm.cdf(cut / noise)
    return float(max(removed, norm.cdf(cut / noise) - math.exp(epsilon) * lower))


def delta_of_masses(event: DpEvent, epsilon: float, interval: float) -> float:
    deltas = []
    for loss in loss_masses(event, interval):
        losses = interval * np.arange(loss.first, loss.first + len(loss.masses))
        deltas.append(loss.infinite + loss.masses @ np.maximum(0.0, -np.expm1(epsilon - losses)))
    return max(deltas)


@pytest.mark.parametrize("interval", [1e-4, 0.01, 0.1])
@pytest.mark.parametrize("epsilon", [0.0333, 0.111, 0.777, 2.345])
def test_the_grid_never_understates_delta(interval: float, epsilon: float) -> None:
    true = sampled_gaussian_delta(epsilon, 0.1, 1.3)
    assert delta_of_masses(SAMPLED, epsilon, interval) >= true * (1 - 1e-9)


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 2.0])
def test_on_the_points_of_the_grid_delta_is_exact(epsilon: float) -> None:
    true = sampled_gaussian_delta(epsilon, 0.1, 1.3)
    assert delta_of_masses(SAMPLED, epsilon, 0.1) == pytest.approx(true, rel=1e-9)


@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.01])
@pytest.mark.parametrize(("q", "noise"), [(0.1, 1.3), (0.9, 2.0), (1e-3, 0.7)])
def test_one_sampled_release_costs_its_closed_form(q: float, noise: float, delta: float) -> None:
    epsilon = composed_epsilon({PoissonSampledDpEvent(q, GaussianDpEvent(noise)): 1}, delta=delta)
    assert sampled_gaussian_delta(epsilon, q, noise) <= delta
    assert epsilon == 0 or sampled_gaussian_delta(epsilon * (1 - 1e-4), q, noise) > delta


@pytest.mark.parametrize("delta", [1e-14, 1e-5, 0.01])
@pytest.mark.parametrize(("noise", "count"), [(1.0, 1), (1.0, 100), (5.0, 100), (30.0, 1000), (0.1, 1)])
def test_composed_gaussians_cost_the_analytic_epsilon_and_never_less(noise: float, count: int, delta: float) -> None:
    def log_delta(epsilon: float) -> float:
        whole = noise / math.sqrt(count)
        upper = norm.logcdf(1 / (2 * whole) - epsilon * whole)
        return float(upper + math.log(-math.expm1(epsilon + norm.logcdf(-1 / (2 * whole) - epsilon * whole) - upper)))

    epsilon = composed_epsilon({GaussianDpEvent(noise): count}, delta=delta)
    assert log_delta(epsilon) <= math.log(delta)
    assert log_delta(epsilon * (1 - 4e-6)) > math.log(delta)


@pytest.mark.parametrize(
    "counts",
    [
        {SAMPLED: 20, PoissonSampledDpEvent(0.02, GaussianDpEvent(0.8)): 50, GaussianDpEvent(9.0): 3},
        {LaplaceDpEvent(3.0): 20, LaplaceDpEvent(5.0): 1},
        {PoissonSampledDpEvent(0.2, LaplaceDpEvent(2.0)): 40},
        {PoissonSampledDpEvent(0.999, GaussianDpEvent(6.0)): 30},
    ],
)
def test_epsilon_agrees_with_dp_accounting(counts: dict[DpEvent, int]) -> None:
    accountant = PLDAccountant(value_discretization_interval=FINEST_INTERVAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # theirs
        for event, count in counts.items():
            accountant.compose(event, count)
        expected = [accountant.get_epsilon(delta) for delta in (1e-7, 1e-3)]
    assert [composed_epsilon(counts, delta=delta) for delta in (1e-7, 1e-3)] == pytest.approx(expected, rel=5e-6)


def test_an_event_without_a_loss_distribution_is_refused() -> None:
    event = PoissonSampledDpEvent(0.1, SAMPLED)
    assert composed_epsilon({GaussianDpEvent(1.0): 1}, delta=1e-25) == math.inf  # below the mass at infinity
    with pytest.raises(ValueError, match="has no loss distribution"):
        composed_epsilon({event: 1}, delta=1e-5)
