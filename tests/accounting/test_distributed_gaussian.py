"""The account of several clients' discrete Gaussians, against exact Renyi divergences by direct convolution."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from numpy.typing import NDArray

from discreet.accounting.accounting import epsilon_spent
from discreet.accounting.distributed_gaussian import DistributedDiscreteGaussianDpEvent, convolution_gap
from discreet.privacy.secure_grid import SecureCohort, secure_sum

Event = DistributedDiscreteGaussianDpEvent


def discrete(variance: float, reach: int) -> NDArray[np.float64]:
    weights = np.exp(-(np.arange(-reach, reach + 1.0) ** 2) / (2 * variance))
    return weights / weights.sum()


def of_sum(variance: int, summands: int) -> NDArray[np.float64]:
    """The probabilities of a sum, up to 22 standard deviations of a summand to either side: positive products added
    up, so right to a few units in the last place each, far into the tails."""
    reach = 30 * math.isqrt(variance) + 10
    one = total = discrete(variance, reach)
    for _ in range(summands - 1):
        total = np.convolve(total, one, mode="same")
    return total[reach // 4 : -(reach // 4)]  # without what the ends of the range spoil


def exact_divergence(variance: int, summands: int, moved: int, order: float) -> float:
    """The Renyi divergence between the sum moved by some steps and the sum."""
    law = np.log(of_sum(variance, summands))
    terms = order * law[: len(law) - moved] + (1 - order) * law[moved:]
    return float(np.logaddexp.reduce(terms)) / (order - 1)


CASES = [(v, h, x) for v in (1, 2, 5) for h in (1, 2, 5) for x in (1, 2)]


@pytest.mark.parametrize(("variance", "summands", "moved"), CASES)
@pytest.mark.parametrize("order", [1.25, 2.0, 6.0])
def test_the_bound_holds_against_the_exact_divergence_and_is_loose_by_less_than_half_a_per_cent(
    variance: int, summands: int, moved: int, order: float
) -> None:
    event = Event(variance, summands, sensitivity_squared=moved**2, dimension=1)
    bound = order / 2 / event.renyi_noise_multiplier**2
    exact = exact_divergence(variance, summands, moved, order)
    assert exact <= bound * (1 + 1e-12) <= exact * 1.005


@pytest.mark.parametrize(("variance", "summands"), [(1, 2), (1, 3), (1, 6), (2, 2)])
def test_half_of_tau_bounds_the_log_ratio_of_a_sum_to_one_discrete_gaussian(variance: int, summands: int) -> None:
    found = of_sum(variance, summands)
    ratio = float(np.abs(np.log(found / discrete(variance * summands, len(found) // 2))).max())
    assert 1e-9 < ratio <= convolution_gap(variance, summands) / 2
    assert summands > 2 or ratio > convolution_gap(variance, summands) / 6


def test_several_coordinates_that_differ_cost_what_the_sum_of_their_exact_divergences_does() -> None:
    """One step in each of four coordinates out of nine: Delta^2 = 4, and no more than four differ."""
    event = Event(1, 3, sensitivity_squared=4, dimension=9)
    bound = 2.0 / 2 / event.renyi_noise_multiplier**2
    assert 4 * exact_divergence(1, 3, 1, 2.0) <= bound <= 4.05 * exact_divergence(1, 3, 1, 2.0)
    assert event.renyi_noise_multiplier == Event(1, 3, sensitivity_squared=4, dimension=4).renyi_noise_multiplier
    assert event.renyi_noise_multiplier < Event(1, 3, sensitivity_squared=4, dimension=1).renyi_noise_multiplier


@pytest.mark.parametrize("noise", [0.5, 1.0, 4.0])
def test_a_round_of_secure_aggregation_costs_what_the_continuous_gaussian_does_within_one_per_cent(
    noise: float,
) -> None:
    event = secure_sum(10_000, SecureCohort(10, 7), noise_multiplier=noise).event_of()
    spent = epsilon_spent([(event, 30)], delta=1e-5, accountant="rdp")
    central = epsilon_spent([(GaussianDpEvent(noise), 30)], delta=1e-5, accountant="rdp")
    assert 0.99 * central < spent < 1.01 * central
