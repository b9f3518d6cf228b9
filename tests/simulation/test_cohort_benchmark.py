"""The benchmarks of cohorts run, small. Their times decide nothing."""

from __future__ import annotations

import pytest

from scripts.benchmarks import cohort, cohort_scale
from scripts.benchmarks.cohort import digits_like


def test_every_way_trains_clients() -> None:
    rows = cohort.rows(models=["logistic_regression"], examples=600, clients=20, repetitions=1)
    assert {"one by one", "batched", "batched, sums on the grid", "DP-SGD, batched"} <= {row["way"] for row in rows}
    assert all(row["clients_per_second"] > 0 for row in rows)


def test_a_large_population_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cohort_scale, "digits_like", lambda: digits_like(200))
    rows = cohort_scale.rows(scales=[(10**6, 20)], flute_rounds=2)
    assert [row["what"] for row in rows] == ["one round", "FLUTE's benchmark, 2 rounds"]
