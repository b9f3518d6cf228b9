"""Epsilon by loss distributions against delta by inversion of the transform: never understated, and how close.

The mixtures are drawn from seeds fixed beforehand; those that the oracle has no answer for are drawn again.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting import DpEvent, GaussianDpEvent, LaplaceDpEvent, PoissonSampledDpEvent
from scipy import fft

from discreet.accounting import loss_distribution
from discreet.accounting.accounting import epsilon_spent
from discreet.accounting.loss_distribution import LossMasses, composed_epsilon, loss_masses
from discreet.privacy.mechanisms import analytic_gaussian_noise_multiplier
from tests.per_example.inversion import Counts, TooWideError, delta_of

PRECISION = 1e-9  # of the oracle, relative to delta


def sampled(probability: float, noise: float) -> DpEvent:
    return PoissonSampledDpEvent(probability, GaussianDpEvent(noise))


def mixture(source: np.random.Generator) -> Counts:
    """1 to 6 sampled Gaussians, and now and then a sampled Laplace beside a Gaussian; up to a million releases."""
    counts: dict[DpEvent, int] = {}
    for _ in range(source.integers(1, 7)):
        event = sampled(10 ** source.uniform(-4, 0), 10 ** source.uniform(-0.3, 1.5))
        counts[event] = int(10 ** source.uniform(0, 6))
    if source.random() < 0.2:
        noise = LaplaceDpEvent(10 ** source.uniform(0, 1.5))
        counts[PoissonSampledDpEvent(source.uniform(), noise)] = int(10 ** source.uniform(0, 3))
        counts[GaussianDpEvent(10 ** source.uniform(-0.3, 1.5))] = 1
    return counts


def shares_of_delta(seed: int, wanted: int) -> list[float]:
    """delta by the oracle at the epsilon stated for a delta, over that delta; epsilons of 0 < epsilon < 50."""
    source, shares = np.random.default_rng(seed), list[float]()
    while len(shares) < wanted:
        counts, delta = mixture(source), float(10 ** source.uniform(-13, -3))
        epsilon = epsilon_spent(list(counts.items()), delta=delta)
        if 0 < epsilon < 50:
            try:
                shares.append(delta_of(counts, epsilon) / delta)
            except TooWideError:
                continue
    return shares


@pytest.mark.parametrize(("seed", "count"), [(60331, 4), pytest.param(90071, 40, marks=pytest.mark.slow)])
def test_epsilon_is_an_upper_bound_for_random_mixtures(seed: int, count: int) -> None:
    shares = shares_of_delta(seed, count)
    assert max(shares) <= 1 + PRECISION
    assert count < 40 or np.median(shares) > 0.99


@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-3), (1.0, 1e-5), (4.0, 1e-9), (1.0, 1e-20)])
def test_the_oracle_gives_the_analytic_gaussian(epsilon: float, delta: float) -> None:
    noise = analytic_gaussian_noise_multiplier(epsilon, delta=delta)
    assert delta_of({GaussianDpEvent(noise * 2): 3, GaussianDpEvent(noise * 4): 4}, epsilon) == pytest.approx(
        delta, rel=1e-6
    )


def sampled_delta(epsilon: float, probability: float, noise: float) -> float:
    """Of one release where a member is removed, in 50 digits: the direction that counts for these."""
    import mpmath

    with mpmath.workdps(50):
        e, q, z = map(mpmath.mpf, (epsilon, probability, noise))
        cut = z**2 * mpmath.log(mpmath.expm1(e) / q + 1) + 0.5
        beyond = [mpmath.erfc(x / z / mpmath.sqrt(2)) / 2 for x in (cut - 1, cut)]
        return float(q * beyond[0] + (1 - q - mpmath.exp(e)) * beyond[1])


@pytest.mark.parametrize("delta", [1e-10, 1e-12, 1e-13, 1e-14, 1e-16, 1e-18, 1e-20])
@pytest.mark.parametrize(("probability", "noise"), [(1e-6, 0.5), (1e-6, 3.0), (1e-3, 0.7), (0.1, 1.3)])
def test_a_delta_of_rounding_error_is_not_understated(delta: float, probability: float, noise: float) -> None:
    epsilon = composed_epsilon({sampled(probability, noise): 1}, delta=delta)
    assert epsilon < math.inf
    assert sampled_delta(epsilon, probability, noise) <= delta


@pytest.mark.parametrize("length", [2**8, 3 * 2**12, 2**18])
def test_a_transform_is_off_by_less_than_its_bound(length: int) -> None:
    """Against one in 64 bits of precision, in units of log2(N) * 2^-53: less than 1 in every value."""
    source, unit = np.random.default_rng(70423), math.log2(length) * 2.0**-53
    for masses in (source.random(length), source.exponential(size=length) ** 8, np.exp(-np.arange(length) / 50)):
        masses /= masses.sum()
        spectrum = fft.rfft(masses)
        exact = fft.rfft(masses.astype(np.longdouble))
        assert np.abs(spectrum - exact).max() < unit / 2
        back = fft.irfft(spectrum, length) - fft.irfft(spectrum.astype(np.clongdouble), length)
        assert np.linalg.norm(back) < unit / 2 * np.linalg.norm(masses)


# The add direction, and that the oracles find what is planted.


def laplace_delta(epsilon: float, probability: float, noise: float, *, count: int, removed: bool) -> float:
    """Of up to three sampled Laplace releases, by a product of Gauss quadratures, right to about 1e-4."""
    nodes, weights = np.polynomial.legendre.leggauss(160)
    x = (nodes + 1) / 2
    lower = np.array(
        [0.5, *(weights / (4 * noise) * np.exp(-x / noise)), 0.5 * math.exp(-1 / noise)]
    )  # below 0, 0 to 1, above 1
    ratio = 1 - probability + probability * np.exp([-1 / noise, *((2 * x - 1) / noise), 1 / noise])
    masses, losses = (lower * ratio, np.log(ratio)) if removed else (lower, -np.log(ratio))
    all_masses, all_losses = np.ones(1), np.zeros(1)
    for _ in range(count):
        all_masses = np.multiply.outer(all_masses, masses).ravel()
        all_losses = np.add.outer(all_losses, losses).ravel()
    return float(all_masses @ np.maximum(0, -np.expm1(epsilon - all_losses)))


@pytest.mark.parametrize(
    ("probability", "noise", "count", "delta"), [(0.1, 1.0, 3, 0.05), (0.5, 2.0, 2, 0.1), (0.8, 2.0, 3, 0.1)]
)
def test_where_adding_a_member_costs_more_that_is_the_epsilon(
    probability: float, noise: float, count: int, delta: float
) -> None:
    """Sampled Laplace noise: without this direction the second epsilon would be 0.056, not 0.097."""
    epsilon = composed_epsilon({PoissonSampledDpEvent(probability, LaplaceDpEvent(noise)): count}, delta=delta)
    added = laplace_delta(epsilon, probability, noise, count=count, removed=False)
    assert added == pytest.approx(delta, rel=2e-3)
    assert laplace_delta(epsilon, probability, noise, count=count, removed=True) < 0.995 * added


def rounded_downwards(event: DpEvent, interval: float) -> tuple[LossMasses, LossMasses]:
    removed, added = loss_masses(event, interval)
    return replace(removed, first=removed.first - 1), replace(added, first=added.first - 1)


def test_a_grid_that_rounds_downwards_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {sampled(0.10000017, 3.0): 512}  # of no other test: grids and transforms are kept
    monkeypatch.setattr(loss_distribution, "loss_masses", rounded_downwards)
    assert delta_of(counts, composed_epsilon(counts, delta=1e-6)) > 1.01e-6


def test_an_engine_without_the_bound_on_its_rounding_errors_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_distribution, "_error_norm", lambda *_: 0.0)
    epsilon = composed_epsilon({sampled(1e-6, 0.5): 1}, delta=1e-16)
    assert sampled_delta(epsilon, 1e-6, 0.5) > 1.0001e-16
