"""The noise really drawn has the size that its event is charged for, and each formula agrees with another source."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from dp_accounting import ComposedDpEvent, DpEvent, GaussianDpEvent, LaplaceDpEvent, NonPrivateDpEvent
from dp_accounting.rdp import RdpAccountant
from scipy import integrate, stats

from discreet.privacy.grid import grid_for
from discreet.privacy.mechanisms import Gaussian, Laplace, analytic_gaussian_noise_multiplier
from discreet.privacy.quantile import split_noise_multiplier
from discreet.privacy.randomness import seeded_source

Noise = Callable[[Gaussian | Laplace, float], torch.Tensor]


def float_noise(mechanism: Gaussian | Laplace, sensitivity: float) -> torch.Tensor:
    return mechanism.add_noise(torch.zeros(200, 100), sensitivity, seeded_source(52517)).flatten()


def grid_noise(mechanism: Gaussian | Laplace, sensitivity: float) -> torch.Tensor:
    grid = grid_for(sensitivity, 20_000)
    total = torch.zeros(200, 100, dtype=torch.int64)
    return grid.to_float(mechanism.add_grid_noise(total, sensitivity, grid=grid, source=seeded_source(52517))).flatten()


def has_mean_square(sample: torch.Tensor, expected: float, *, kurtosis: float) -> bool:
    """By the normal law of the mean: false alarm 1e-6."""
    ratio = float(sample.double().square().mean()) / expected
    return abs(ratio - 1) < 4.9 * math.sqrt((kurtosis - 1) / len(sample))


@pytest.mark.parametrize("noise", [float_noise, grid_noise])
@pytest.mark.parametrize(
    ("mechanism", "law", "event"),
    [
        (Gaussian(1.3), stats.norm, GaussianDpEvent(1.3)),
        (Gaussian(1.3, draws=4), stats.norm, GaussianDpEvent(1.3)),
        (Laplace(1.3), stats.laplace, LaplaceDpEvent(1.3)),
    ],
)
def test_noise_has_the_size_that_its_event_says_and_not_a_tenth_more_or_less(
    noise: Noise, mechanism: Gaussian | Laplace, law: stats.rv_continuous, event: DpEvent
) -> None:
    sample = noise(mechanism, 0.7)
    variance, kurtosis = (0.91 * law.std()) ** 2, 3 + float(law.stats(moments="k"))
    assert mechanism.event() == event
    assert stats.kstest(sample.numpy() / 0.91, law.cdf).pvalue > 1e-4
    assert has_mean_square(sample, variance, kurtosis=kurtosis)
    assert not has_mean_square(0.9 * sample, variance, kurtosis=kurtosis)
    assert not has_mean_square(1.1 * sample, variance, kurtosis=kurtosis)


@pytest.mark.parametrize("mechanism", [Gaussian(0.0), Laplace(0.0)])
def test_no_noise_leaves_a_total_alone_and_costs_infinite_epsilon(mechanism: Gaussian | Laplace) -> None:
    total = torch.tensor([1.5, -2.0])
    same = mechanism.add_noise(total, math.inf, seeded_source(7349))
    assert torch.equal(same, total)
    assert same is not total
    steps = torch.tensor([3, -4])
    assert torch.equal(mechanism.add_grid_noise(steps, 1.0, grid=grid_for(1.0, 2), source=seeded_source(7349)), steps)
    assert mechanism.event() == NonPrivateDpEvent()


@pytest.mark.parametrize(("z", "count_stddev"), [(1.0, 5.0), (3.0, 1.6), (0.3, 0.5)])
def test_update_and_bits_together_cost_one_gaussian(z: float, count_stddev: float) -> None:
    update = GaussianDpEvent(split_noise_multiplier(z, count_stddev=count_stddev))
    both = ComposedDpEvent([update, GaussianDpEvent(2 * count_stddev)])
    costs = [RdpAccountant().compose(event).get_epsilon(1e-6) for event in (both, GaussianDpEvent(z))]
    assert math.isclose(*costs, rel_tol=1e-9)


def delta_by_integration(epsilon: float, noise_multiplier: float) -> float:
    """The hockey-stick divergence of two Gaussians at distance 1, integrated where the first is the larger."""
    start = 0.5 - epsilon * noise_multiplier**2  # exp(-x^2/2z^2) = exp(epsilon - (x-1)^2/2z^2) at this x, larger below

    def excess(x: float) -> float:
        density = stats.norm(scale=noise_multiplier).pdf
        return float(density(x) - math.exp(epsilon) * density(x - 1))

    ends = [start - size * noise_multiplier for size in (0, 1, 3, 9, 40)]
    return math.fsum(integrate.quad(excess, low, high, epsabs=0, epsrel=1e-9)[0] for high, low in pairwise(ends))


@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-6), (8.0, 1e-9), (0.0, 0.01)])
def test_the_analytic_noise_multiplier_meets_delta_and_no_smaller_one_does(epsilon: float, delta: float) -> None:
    noise_multiplier = analytic_gaussian_noise_multiplier(epsilon, delta=delta)
    assert math.isclose(delta_by_integration(epsilon, noise_multiplier), delta, rel_tol=1e-6)
    assert delta_by_integration(epsilon, 0.999 * noise_multiplier) > delta


@pytest.mark.parametrize("mechanism", [Gaussian(1.3), Gaussian(1.3, draws=4), Laplace(1.3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_does_not_depend_on_the_total(mechanism: Gaussian | Laplace, dtype: torch.dtype) -> None:
    total = torch.linspace(-2, 2, 60, dtype=dtype).reshape(3, 4, 5)
    noised = mechanism.add_noise(total, 0.5, seeded_source(7349))
    noise = mechanism.add_noise(torch.zeros_like(total), 0.5, seeded_source(7349))
    assert noised.shape == total.shape
    assert noised.dtype == dtype
    assert torch.equal(noised, total + noise)
    steps, grid = torch.arange(-30, 30) * 10**9, grid_for(0.5, 60)
    noised, noise = (
        mechanism.add_grid_noise(each, 0.5, grid=grid, source=seeded_source(7349))
        for each in (steps, torch.zeros_like(steps))
    )
    assert torch.equal(noised - noise, steps)
