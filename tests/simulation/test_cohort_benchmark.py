"""The benchmarks of cohorts run, small. Their times decide nothing."""

from __future__ import annotations

import pytest

from benchmarks import cohort_scale_speed as cohort_scale
from benchmarks import cohort_speed as cohort
from benchmarks import ray_speed
from benchmarks.cohort_speed import digits_like


@pytest.mark.slow
def test_every_way_trains_clients() -> None:
    rows = cohort.rows(models=["logistic_regression"], examples=600, clients=20, repetitions=1)
    assert {"sequential", "batched", "batched, sums on the grid", "DP-SGD, batched"} <= {row["way"] for row in rows}
    assert all(row["clients_per_second"] > 0 for row in rows)


@pytest.mark.slow
def test_a_large_population_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cohort_scale, "digits_like", lambda: digits_like(200))
    rows = cohort_scale.rows(scales=[(10**6, 20)], flute_rounds=2)
    assert [row["what"] for row in rows] == ["one round", "FLUTE's benchmark, 2 rounds"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_ray_is_measured_beside_forked_workers() -> None:
    rows = ray_speed.rows(models=["logistic_regression"], examples=600, repetitions=1)
    assert [row["way"] for row in rows] == list(ray_speed.WAYS)
