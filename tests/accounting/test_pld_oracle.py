"""Epsilon by loss distributions against delta by inversion of the transform: never understated, and
how close.

The mixtures are drawn from seeds fixed beforehand; those that the oracle has no answer for are
drawn again.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting import DpEvent, GaussianDpEvent, LaplaceDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from numpy.typing import NDArray
from scipy import fft
from scipy.stats import norm

from discreet.accounting import loss_distribution
from discreet.accounting.accounting import epsilon_spent
from discreet.accounting.loss_distribution import (
    FINEST_INTERVAL,
    LossMasses,
    composed_epsilon,
    loss_masses,
)
from discreet.privacy.mechanisms import analytic_gaussian_noise_multiplier

PRECISION = 1e-9  # of the oracle, relative to delta


def sampled(probability: float, noise: float) -> DpEvent:
    return PoissonSampledDpEvent(probability, GaussianDpEvent(noise))


def mixture(source: np.random.Generator) -> Counts:
    """1 to 6 sampled Gaussians, and now and then a sampled Laplace beside a Gaussian; up to a
    million releases."""
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
    """delta by the oracle at the epsilon stated for a delta, over that delta; epsilons of 0 <
    epsilon < 50."""
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


@pytest.mark.parametrize(
    ("seed", "count"), [(60331, 4), pytest.param(90071, 40, marks=pytest.mark.slow)]
)
def test_epsilon_is_an_upper_bound_for_random_mixtures(seed: int, count: int) -> None:
    shares = shares_of_delta(seed, count)
    assert max(shares) <= 1 + PRECISION
    assert count < 40 or np.median(shares) > 0.99


@pytest.mark.parametrize(
    ("epsilon", "delta"), [(0.1, 1e-3), (1.0, 1e-5), (4.0, 1e-9), (1.0, 1e-20)]
)
def test_the_oracle_gives_the_analytic_gaussian(epsilon: float, delta: float) -> None:
    noise = analytic_gaussian_noise_multiplier(epsilon, delta=delta)
    assert delta_of(
        {GaussianDpEvent(noise * 2): 3, GaussianDpEvent(noise * 4): 4}, epsilon
    ) == pytest.approx(delta, rel=1e-6)


def sampled_delta(epsilon: float, probability: float, noise: float) -> float:
    """Of one release where a member is removed, in 50 digits: the direction that counts for
    these."""
    import mpmath

    with mpmath.workdps(50):
        e, q, z = map(mpmath.mpf, (epsilon, probability, noise))
        cut = z**2 * mpmath.log(mpmath.expm1(e) / q + 1) + 0.5
        beyond = [mpmath.erfc(x / z / mpmath.sqrt(2)) / 2 for x in (cut - 1, cut)]
        return float(q * beyond[0] + (1 - q - mpmath.exp(e)) * beyond[1])


@pytest.mark.parametrize("delta", [1e-10, 1e-12, 1e-13, 1e-14, 1e-16, 1e-18, 1e-20])
@pytest.mark.parametrize(
    ("probability", "noise"), [(1e-6, 0.5), (1e-6, 3.0), (1e-3, 0.7), (0.1, 1.3)]
)
def test_a_delta_of_rounding_error_is_not_understated(
    delta: float, probability: float, noise: float
) -> None:
    epsilon = composed_epsilon({sampled(probability, noise): 1}, delta=delta)
    assert epsilon < math.inf
    assert sampled_delta(epsilon, probability, noise) <= delta


@pytest.mark.parametrize("length", [2**8, 3 * 2**12, 2**18])
def test_a_transform_is_off_by_less_than_its_bound(length: int) -> None:
    """Against one in 64 bits of precision, in units of log2(N) * 2^-53: less than 1 in every
    value."""
    source, unit = np.random.default_rng(70423), math.log2(length) * 2.0**-53
    for masses in (
        source.random(length),
        source.exponential(size=length) ** 8,
        np.exp(-np.arange(length) / 50),
    ):
        masses /= masses.sum()
        spectrum = fft.rfft(masses)
        exact = fft.rfft(masses.astype(np.longdouble))
        assert np.abs(spectrum - exact).max() < unit / 2
        back = fft.irfft(spectrum, length) - fft.irfft(spectrum.astype(np.clongdouble), length)
        assert np.linalg.norm(back) < unit / 2 * np.linalg.norm(masses)


# The add direction, and that the oracles find what is planted.


def laplace_delta(
    epsilon: float, probability: float, noise: float, *, count: int, removed: bool
) -> float:
    """Of up to three sampled Laplace releases, by a product of Gauss quadratures, right to about
    1e-4."""
    nodes, weights = np.polynomial.legendre.leggauss(160)
    x = (nodes + 1) / 2
    # below 0, 0 to 1, above 1
    lower = np.array(
        [0.5, *(weights / (4 * noise) * np.exp(-x / noise)), 0.5 * math.exp(-1 / noise)]
    )
    ratio = 1 - probability + probability * np.exp([-1 / noise, *((2 * x - 1) / noise), 1 / noise])
    masses, losses = (lower * ratio, np.log(ratio)) if removed else (lower, -np.log(ratio))
    all_masses, all_losses = np.ones(1), np.zeros(1)
    for _ in range(count):
        all_masses = np.multiply.outer(all_masses, masses).ravel()
        all_losses = np.add.outer(all_losses, losses).ravel()
    return float(all_masses @ np.maximum(0, -np.expm1(epsilon - all_losses)))


@pytest.mark.parametrize(
    ("probability", "noise", "count", "delta"),
    [(0.1, 1.0, 3, 0.05), (0.5, 2.0, 2, 0.1), (0.8, 2.0, 3, 0.1)],
)
def test_where_adding_a_member_costs_more_that_is_the_epsilon(
    probability: float, noise: float, count: int, delta: float
) -> None:
    """Sampled Laplace noise: without this direction the second epsilon would be 0.056, not
    0.097."""
    epsilon = composed_epsilon(
        {PoissonSampledDpEvent(probability, LaplaceDpEvent(noise)): count}, delta=delta
    )
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


def test_an_engine_without_the_bound_on_its_rounding_errors_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loss_distribution, "_error_norm", lambda *_: 0.0)
    epsilon = composed_epsilon({sampled(1e-6, 0.5): 1}, delta=1e-16)
    assert sampled_delta(epsilon, 1e-6, 0.5) > 1.0001e-16


Complex = NDArray[np.complex128]
Real = NDArray[np.float64]
Counts = Mapping[DpEvent, int]

NEGLIGIBLE = 1e-17  # of the integrand at the saddle point
PER_WIDTH = 12  # points of the contour in a standard deviation of the integrand
MOST_POINTS = 2**13
MOST_TERMS = 2**22


class TooWideError(ValueError):
    """The integrand falls so slowly that this oracle has no answer."""


def delta_of(
    counts: Counts, epsilon: float, *, per_width: int = PER_WIDTH, bend: float | None = None
) -> float:
    """The larger delta of removing and adding a member.

    `bend` is how far the contour leans: it decides nothing but the precision. Right to about 1e-12
    of delta.
    """
    if bend is None:  # bounded losses grow to the right where epsilon is below the largest one
        bend = 0.0 if any(isinstance(_noise(event), LaplaceDpEvent) for event in counts) else 0.5
    return max(
        _inverted(counts, epsilon, removed=removed, per_width=per_width, bend=bend)
        for removed in (True, False)
    )


def _inverted(
    counts: Counts, epsilon: float, *, removed: bool, per_width: int, bend: float
) -> float:
    def log_integrand(s: Complex, reach: float) -> Complex:
        with np.errstate(over="ignore", invalid="ignore"):
            moments = sum(
                n * _log_moment(e, s, removed=removed, reach=reach) for e, n in counts.items()
            )
        return np.asarray(moments - s * epsilon - np.log(s) - np.log(s + 1), dtype=np.complex128)

    saddle, width = _saddle(lambda c: log_integrand(c.astype(np.complex128), 0.0).real)
    top = float(log_integrand(np.array([saddle + 0j]), 0.0).real[0])
    step, count = width / per_width, 64
    while True:
        y = step * np.arange(count)
        lean = np.sqrt(1 + (y / width) ** 2)
        s = saddle + bend * width * (lean - 1) + 1j * y
        with np.errstate(over="ignore", invalid="ignore"):
            values = np.exp(log_integrand(s, float(y[-1])) - top)
        if not np.isfinite(values).all() or count > MOST_POINTS:
            raise TooWideError
        if np.abs(values[-8:]).max() < NEGLIGIBLE:
            break
        count *= 2
    slope = bend * (y / width) / lean + 1j
    parts = (values * slope).imag
    parts[0] /= 2
    total = float(parts.sum()) * step / math.pi
    return math.exp(top) * total


def _saddle(log_integrand: Callable[[Real], Real]) -> tuple[float, float]:
    """The place on the real axis at which the integrand is least, and its width there."""
    low, middle, high = 2.0**-12, 2.0**-11, 2.0**-10
    while log_integrand(np.array([middle])) > log_integrand(np.array([high])):
        low, middle, high = middle, high, 2 * high
    for _ in range(6):
        points = np.linspace(low, high, 9)
        best = int(np.clip(np.argmin(np.nan_to_num(log_integrand(points), nan=np.inf)), 1, 7))
        low, middle, high = points[best - 1 : best + 2]
    left, least, right = log_integrand(middle * np.array([0.99, 1.0, 1.01]))
    if not left - 2 * least + right > 0:
        raise TooWideError
    return middle, float(0.01 * middle * (left - 2 * least + right) ** -0.5)


def _noise(event: DpEvent) -> DpEvent:
    return event.event if isinstance(event, PoissonSampledDpEvent) else event


def _log_moment(event: DpEvent, s: Complex, *, removed: bool, reach: float) -> Complex:
    """log E[exp(s * loss)] of one release; `reach` is the largest imaginary part of `s`."""
    noise, scale = _noise(event), _noise(event).noise_multiplier
    if isinstance(event, GaussianDpEvent):
        return s * (s + 1) / (2 * scale**2)
    q = event.sampling_probability if isinstance(event, PoissonSampledDpEvent) else 1.0
    points, weights = (_laplace_points if isinstance(noise, LaplaceDpEvent) else _gaussian_points)(
        scale, float(s.real.max()), reach
    )
    loss = np.logaddexp(np.log1p(-q), np.log(q) + points) if q < 1 else points
    if len(loss) * len(s) > MOST_TERMS:
        raise TooWideError
    order = s + 1 if removed else -s
    parts = np.array_split(order, 1 + len(loss) * len(s) // 2**20)
    return np.log1p(
        np.concatenate([np.expm1(np.multiply.outer(part, loss)) @ weights for part in parts])
    )


def _gaussian_points(scale: float, order: float, reach: float) -> tuple[Real, Real]:
    """log(mean 1 / mean 0) at evenly spaced values of the noise of mean 0, and their
    probabilities."""
    step = min(scale / 6, scale**2 / 4, math.pi / (reach / scale**2 + 16 / scale))
    if order + 24 * scale > MOST_TERMS * step:
        raise TooWideError
    x = np.arange(-12 * scale - 1, order + 2 + 12 * scale, step)
    return (x - 0.5) / scale**2, step * norm.pdf(x, scale=scale)


def _laplace_points(scale: float, order: float, reach: float) -> tuple[Real, Real]:
    """The same for Laplace noise: two ends, beyond which the loss stays what it is, and Gauss
    points between."""
    nodes, weights = np.polynomial.legendre.leggauss(64 + 2 * math.ceil(reach / scale))
    x = (nodes + 1) / 2
    between = weights / 2 * np.exp(-x / scale) / (2 * scale)
    ends = [0.5, 0.5 * math.exp(-1 / scale)]
    return np.array([-1 / scale, *((2 * x - 1) / scale), 1 / scale]), np.array(
        [ends[0], *between, ends[1]]
    )


SAMPLED = PoissonSampledDpEvent(0.1, GaussianDpEvent(1.3))


def sampled_gaussian_delta(epsilon: float, q: float, noise: float) -> float:
    """The larger delta of one Poisson-sampled Gaussian release, removing and adding (Zhu et al.
    2022)."""
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
@pytest.mark.parametrize(
    ("noise", "count"), [(1.0, 1), (1.0, 100), (5.0, 100), (30.0, 1000), (0.1, 1)]
)
def test_composed_gaussians_cost_the_analytic_epsilon_and_never_less(
    noise: float, count: int, delta: float
) -> None:
    def log_delta(epsilon: float) -> float:
        whole = noise / math.sqrt(count)
        upper = norm.logcdf(1 / (2 * whole) - epsilon * whole)
        return float(
            upper
            + math.log(
                -math.expm1(epsilon + norm.logcdf(-1 / (2 * whole) - epsilon * whole) - upper)
            )
        )

    epsilon = composed_epsilon({GaussianDpEvent(noise): count}, delta=delta)
    assert log_delta(epsilon) <= math.log(delta)
    assert log_delta(epsilon * (1 - 4e-6)) > math.log(delta)


@pytest.mark.parametrize(
    "counts",
    [
        {
            SAMPLED: 20,
            PoissonSampledDpEvent(0.02, GaussianDpEvent(0.8)): 50,
            GaussianDpEvent(9.0): 3,
        },
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
    assert [composed_epsilon(counts, delta=delta) for delta in (1e-7, 1e-3)] == pytest.approx(
        expected, rel=5e-6
    )


def test_an_event_without_a_loss_distribution_is_refused() -> None:
    event = PoissonSampledDpEvent(0.1, SAMPLED)
    # below the mass at infinity
    assert composed_epsilon({GaussianDpEvent(1.0): 1}, delta=1e-25) == math.inf
    with pytest.raises(ValueError, match="has no loss distribution"):
        composed_epsilon({event: 1}, delta=1e-5)
