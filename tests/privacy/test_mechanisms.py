"""The noise really drawn has the size that its event is charged for, and each formula agrees with
another source."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
)
from dp_accounting.rdp import RdpAccountant
from scipy import integrate, stats

from discreet.privacy.clipping import ClippedSum, clip_by_norm, clip_to_grid
from discreet.privacy.discrete_gaussian import LARGEST_VARIANCE, discrete_gaussian
from discreet.privacy.grid import LARGEST_SCALE, Grid, grid_for
from discreet.privacy.mechanisms import Gaussian, Laplace, analytic_gaussian_noise_multiplier
from discreet.privacy.quantile import QuantileEstimator, split_noise_multiplier
from discreet.privacy.randomness import RandomSource, seeded_source
from discreet.privacy.sampling import CohortSampling, fixed_size_sample, poisson_sample
from discreet.privacy.selection import TrialCount

Noise = Callable[[Gaussian | Laplace, float], torch.Tensor]


def float_noise(mechanism: Gaussian | Laplace, sensitivity: float) -> torch.Tensor:
    return mechanism.add_noise(torch.zeros(200, 100), sensitivity, seeded_source(52517)).flatten()


def grid_noise(mechanism: Gaussian | Laplace, sensitivity: float) -> torch.Tensor:
    grid = grid_for(sensitivity, 20_000)
    total = torch.zeros(200, 100, dtype=torch.int64)
    return grid.to_float(
        mechanism.add_grid_noise(total, sensitivity, grid=grid, source=seeded_source(52517))
    ).flatten()


def has_mean_square(sample: torch.Tensor, expected: float, *, kurtosis: float) -> bool:
    """By the normal law of the mean: false alarm 1e-6."""
    ratio = float(sample.double().square().mean()) / expected
    return abs(ratio - 1) < 4.9 * math.sqrt((kurtosis - 1) / len(sample))


@pytest.mark.parametrize("noise", [float_noise, grid_noise])
@pytest.mark.parametrize(
    ("mechanism", "law", "event"),
    [
        (Gaussian(1.3), stats.norm, GaussianDpEvent(1.3)),
        (Gaussian(1.3, "secure_sum"), stats.norm, GaussianDpEvent(1.3)),
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
def test_no_noise_leaves_a_total_alone_and_costs_infinite_epsilon(
    mechanism: Gaussian | Laplace,
) -> None:
    total = torch.tensor([1.5, -2.0])
    same = mechanism.add_noise(total, math.inf, seeded_source(7349))
    assert torch.equal(same, total)
    assert same is not total
    steps = torch.tensor([3, -4])
    assert torch.equal(
        mechanism.add_grid_noise(steps, 1.0, grid=grid_for(1.0, 2), source=seeded_source(7349)),
        steps,
    )
    assert mechanism.event() == NonPrivateDpEvent()


@pytest.mark.parametrize(("z", "count_stddev"), [(1.0, 5.0), (3.0, 1.6), (0.3, 0.5)])
def test_update_and_bits_together_cost_one_gaussian(z: float, count_stddev: float) -> None:
    update = GaussianDpEvent(split_noise_multiplier(z, count_stddev=count_stddev))
    both = ComposedDpEvent([update, GaussianDpEvent(2 * count_stddev)])
    costs = [
        RdpAccountant().compose(event).get_epsilon(1e-6) for event in (both, GaussianDpEvent(z))
    ]
    assert math.isclose(*costs, rel_tol=1e-9)


def delta_by_integration(epsilon: float, noise_multiplier: float) -> float:
    """The hockey-stick divergence of two Gaussians at distance 1, integrated where the first is the
    larger."""
    # exp(-x^2/2z^2) = exp(epsilon - (x-1)^2/2z^2) at this x, larger below
    start = 0.5 - epsilon * noise_multiplier**2

    def excess(x: float) -> float:
        density = stats.norm(scale=noise_multiplier).pdf
        return float(density(x) - math.exp(epsilon) * density(x - 1))

    ends = [start - size * noise_multiplier for size in (0, 1, 3, 9, 40)]
    return math.fsum(
        integrate.quad(excess, low, high, epsabs=0, epsrel=1e-9)[0] for high, low in pairwise(ends)
    )


@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-6), (8.0, 1e-9), (0.0, 0.01)])
def test_the_analytic_noise_multiplier_meets_delta_and_no_smaller_one_does(
    epsilon: float, delta: float
) -> None:
    noise_multiplier = analytic_gaussian_noise_multiplier(epsilon, delta=delta)
    assert math.isclose(delta_by_integration(epsilon, noise_multiplier), delta, rel_tol=1e-6)
    assert delta_by_integration(epsilon, 0.999 * noise_multiplier) > delta


@pytest.mark.parametrize("mechanism", [Gaussian(1.3), Gaussian(1.3, "secure_sum"), Laplace(1.3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_does_not_depend_on_the_total(
    mechanism: Gaussian | Laplace, dtype: torch.dtype
) -> None:
    total = torch.linspace(-2, 2, 60, dtype=dtype).reshape(3, 4, 5)
    noised = mechanism.add_noise(total, 0.5, seeded_source(7349))
    noise = mechanism.add_noise(torch.zeros_like(total), 0.5, seeded_source(7349))
    assert noised.shape == total.shape
    assert noised.dtype == dtype
    if mechanism == Gaussian(1.3):  # in whole steps of 1/32, which 0.65 / 16 is rounded down to
        assert float((noised - total - noise).abs().max()) <= 1 / 32 + 1e-6
    elif isinstance(mechanism, Laplace):
        assert float((noised - total - noise).abs().max()) <= 2.0**-20
    else:
        assert torch.equal(noised, total + noise)
    steps, grid = torch.arange(-30, 30) * 10**9, grid_for(0.5, 60)
    noised, noise = (
        mechanism.add_grid_noise(each, 0.5, grid=grid, source=seeded_source(7349))
        for each in (steps, torch.zeros_like(steps))
    )
    assert torch.equal(noised - noise, steps)


COHORT = 200


def centred_count(
    norms: np.ndarray, clip_norm: float, source: RandomSource, count_stddev: float = 10.0
) -> float:
    return float(np.sum((norms <= clip_norm) - 0.5) + count_stddev * source.normal(1).item())


@pytest.mark.parametrize("start", [0.01, 100.0])
@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
def test_the_estimate_converges_to_the_true_quantile(start: float, quantile: float) -> None:
    estimator, source = QuantileEstimator(start, quantile, 0.2), seeded_source(48271)
    norms = np.exp(0.5 * seeded_source(9173).normal(100_000).numpy())  # log-normal, median 1
    true = float(np.quantile(norms, quantile))
    tail = []
    for number in range(400):
        cohort = norms[(number * COHORT) % len(norms) :][:COHORT]
        count = centred_count(cohort, estimator.estimate, source)
        estimator, _ = estimator.update(count, expected_cohort=COHORT)
        tail.append(estimator.estimate)
    assert np.median(tail[-100:]) == pytest.approx(true, rel=0.1)


@pytest.mark.parametrize("median", [0.02, 0.1, 0.7, 3.0])
def test_a_search_comes_near_the_median_in_five_rounds(median: float) -> None:
    source, estimate = seeded_source(60917), 0.1
    for number in range(5):
        norms = median * np.exp(0.3 * source.normal(COHORT).numpy())
        estimator = QuantileEstimator(estimate, 0.5, 0.2, search_rate=5 * 0.5**number, doubt=0.1)
        found, _ = estimator.update(centred_count(norms, estimate, source), expected_cohort=COHORT)
        estimate = found.estimate
    assert median / 2 < estimate < 2 * median


def test_it_never_passes_its_ceiling_and_comes_down_from_it() -> None:
    estimator, estimates = QuantileEstimator(1.0, 0.5, 0.2, ceiling=3.0), []
    for _ in range(20):
        estimator, _ = estimator.update(-1e9, expected_cohort=10)
        estimates.append(estimator.estimate)
    assert max(estimates) == estimates[-1] == 3.0
    assert estimator.update(1e9, expected_cohort=10)[0].estimate < 3.0


NAN, INF = math.nan, math.inf
SOURCE, GRID, ROW = seeded_source(1193), Grid(0.5), torch.zeros(1, 2)
MECHANISMS = (Gaussian(1.0), Laplace(1.0))
NOISES = tuple(mechanism.add_noise for mechanism in MECHANISMS)
SUMS = (ClippedSum(3, 1.0), ClippedSum(3, 1.0, grid=GRID))


REFUSED: list[tuple[Callable[..., object], tuple[object, ...], dict[str, object], str]] = [
    *((clip_by_norm, (ROW, clip), {}, "clip_norm must be within") for clip in (-1.0, NAN)),
    (clip_to_grid, (ROW[0], 2.0**26), {"grid": GRID}, "clip_norm must be in"),
    *((total.add, (ROW,), {}, "must be floating point of shape") for total in SUMS),
    *(
        (discrete_gaussian, (1, wrong, SOURCE), {}, "variance must be")
        for wrong in (-1, 1.5, LARGEST_VARIANCE + 1)
    ),
    (Grid, (0.3,), {}, "power of two"),
    (grid_for, (1.0, 1_000_000), {"largest_cohort": 10**13}, "could overflow int64"),
    *(
        (GRID.gaussian, (3, scale, SOURCE), {}, "noise must be in")
        for scale in (-1.0, NAN, LARGEST_SCALE)
    ),
    *(
        (kind, (noise,), {}, "noise_multiplier must be finite")
        for kind in (Gaussian, Laplace)
        for noise in (-0.1, NAN)
    ),
    *(
        (noise, (ROW, wrong, SOURCE), {}, "must be finite and above 0")
        for noise in NOISES
        for wrong in (0.0, NAN)
    ),
    *(
        (noise, (ROW, wrong, SOURCE), {}, "vanish or overflow")
        for noise in NOISES
        for wrong in (1e-40, 1e38)
    ),
    *(
        (noise, (ROW + wrong, 1.0, SOURCE), {}, "total must be finite")
        for noise in NOISES
        for wrong in (NAN, INF)
    ),
    *((noise, (ROW.half(), 1.0, SOURCE), {}, "must be float32 or") for noise in NOISES),
    *(
        (each.add_grid_noise, (ROW, 1.0), {"grid": GRID, "source": SOURCE}, "must be int64")
        for each in MECHANISMS
    ),
    (split_noise_multiplier, (2.0,), {"count_stddev": 1.0}, "count_stddev must be > noise"),
    (analytic_gaussian_noise_multiplier, (1.0,), {"delta": 0.0}, "delta must be in"),
    *((seeded_source, (seed,), {}, "seed must be an int >= 0") for seed in (-1, True, None)),
    (poisson_sample, (3,), {"probability": NAN, "source": SOURCE}, "probability must be in"),
    *(
        (CohortSampling(kind, 0.5, 4).draw, ([5, 6, 5], SOURCE), {}, "distinct")
        for kind in ("poisson", "fixed", "everyone", "cyclic")
    ),
    (fixed_size_sample, (3,), {"size": 4, "source": SOURCE}, "size must be in"),
    (TrialCount, ("poisson", NAN), {}, "mean"),
]


@pytest.mark.parametrize(("call", "given", "named", "said"), REFUSED)
def test_a_value_out_of_range_is_refused_with_its_name(
    call: Callable[..., object], given: tuple[object, ...], named: dict[str, object], said: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        call(*given, **named)
