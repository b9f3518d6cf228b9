"""A guarded site's sampled blocks: the pair that dominates, composed, beside a computation of its
own and beside what is charged."""

from __future__ import annotations

import itertools
import math
from functools import cache

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from scipy.stats import norm

from discreet.accounting.accounting import epsilon_spent
from discreet.accounting.events import PLD, poisson_round_event
from discreet.accounting.loss_distribution import ReplacedGaussianDpEvent, composed_epsilon
from discreet.accounting.privacy_ledger import PrivacyLedger, epsilon_of_blocks

DELTA = 1e-5
SETTINGS = [*itertools.product((0.02, 0.1, 0.3, 0.6, 0.9), (0.7, 1.0, 2.0, 4.0, 8.0), (1, 10, 100))]


def charged(q: float, noise: float, rounds: int) -> float:
    event = PoissonSampledDpEvent(q, GaussianDpEvent(noise))
    return epsilon_spent([(event, rounds)], delta=DELTA)


def exactly(q: float, noise: float, rounds: int) -> float:
    return composed_epsilon({ReplacedGaussianDpEvent(q, noise): rounds}, delta=DELTA)


def by_transform(q: float, noise: float, rounds: int) -> float:
    """By a Fourier transform of the loss on a fine grid: neither an upper nor a lower bound."""
    shift = 0.5 / noise
    place = np.linspace(-shift - 12, shift + 12, 500_001)
    upper, lower = (
        (1 - q) * norm.pdf(place) + q * norm.pdf(place - sign * shift) for sign in (1, -1)
    )
    loss = np.log(upper / lower)
    mass = upper / upper.sum()
    mean = mass @ loss
    deviation = math.sqrt(rounds * (mass @ loss**2 - mean**2))
    span = rounds * mean + 12 * deviation + 2 * abs(loss[0])
    points = 2**18
    step = 2 * span / points
    low = np.floor(loss / step).astype(int)
    above = loss / step - low
    binned = np.zeros(points)
    np.add.at(binned, low % points, mass * (1 - above))
    np.add.at(binned, (low + 1) % points, mass * above)
    summed = np.maximum(np.fft.irfft(np.fft.rfft(binned) ** rounds, points), 0)
    losses = np.fft.fftfreq(points, 1 / points) * step
    least, most = 0.0, span
    for _ in range(60):
        middle = (least + most) / 2
        if summed @ np.maximum(1 - np.exp(np.minimum(middle - losses, 0)), 0) > DELTA:
            least = middle
        else:
            most = middle
    return most


@pytest.mark.parametrize(
    ("q", "noise", "rounds"), [(0.1, 2.0, 100), (0.3, 4.0, 100), (0.6, 1.0, 1), (0.9, 2.0, 10)]
)
def test_its_epsilon_is_that_of_a_computation_of_its_own(
    q: float, noise: float, rounds: int
) -> None:
    assert exactly(q, noise, rounds) == pytest.approx(by_transform(q, noise, rounds), rel=1e-4)


def test_it_is_at_most_what_is_charged() -> None:
    known = {each: charged(*each) for each in SETTINGS}
    found = {each: exactly(*each) / epsilon for each, epsilon in known.items() if epsilon > 0.01}
    assert len(found) > 60
    assert max(found.values()) < 1


def test_without_sampling_it_is_a_gaussian_of_twice_the_clip_norm() -> None:
    almost = exactly(1 - 1e-9, 2.0, 3)
    assert almost == pytest.approx(
        epsilon_spent([(GaussianDpEvent(2.0), 3)], delta=DELTA), rel=1e-3
    )


SHARE, NOISE = 0.3, 0.4  # the noise is of 2C: the clip norm is 1, the noise 0.8
AXIS = np.linspace(-7, 7, 561)
Pair = tuple[float, float]


@cache
def sampled(mean: Pair) -> np.ndarray:
    """The density on a plane of a sum into which an update comes with probability SHARE."""

    def density(middle: Pair) -> np.ndarray:
        return np.outer(*(norm.pdf((AXIS - each) / (2 * NOISE)) for each in middle))

    return (1 - SHARE) * density((0.0, 0.0)) + SHARE * density(mean)


@cache
def delta(one: Pair, two: Pair, epsilon: float) -> float:
    left, right = sampled(one), sampled(two)
    return float(np.maximum(left - math.exp(epsilon) * right, 0).sum() / left.sum())


@pytest.mark.parametrize("u", [(0.6, 0.0), (1.0, 0.0), (0.0, 1.0), (-0.5, 0.3)])
@pytest.mark.parametrize("other", [(-1.0, 0.0), (0.0, -1.0), (0.2, 0.1), (0.0, 0.0)])
def test_no_other_pair_of_updates_costs_more_at_any_epsilon(u: Pair, other: Pair) -> None:
    for epsilon in (-1.0, -0.2, 0.0, 0.2, 1.0):
        worst = delta((1.0, 0.0), (-1.0, 0.0), epsilon)
        assert delta(u, other, epsilon) <= worst + 1e-6


def test_a_site_goes_by_the_larger_of_both() -> None:
    spent = PrivacyLedger().record(poisson_round_event(0.3, noise_multiplier=2.0), 10)
    assert epsilon_of_blocks(spent, DELTA, PLD) == charged(0.3, 2.0, 10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("discreet.accounting.loss_distribution.composed_epsilon", lambda *_, **__: 99)
        assert epsilon_of_blocks(spent, DELTA, PLD) == 99
