"""The adaptive clip norm goes to the quantile that it is told to track."""

from __future__ import annotations

import numpy as np
import pytest

from discreet.privacy.quantile import QuantileEstimator
from discreet.privacy.randomness import RandomSource, seeded_source

COHORT = 200


def centred_count(norms: np.ndarray, clip_norm: float, source: RandomSource, count_stddev: float = 10.0) -> float:
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
