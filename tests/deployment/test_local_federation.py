"""The commands that start a whole federation run, small."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.million import million
from scripts.benchmarks import deployment
from scripts.local_federation import main


@pytest.mark.slow
def test_a_federation_on_this_machine_trains(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--nodes", "1", "rounds=1"]) == 0
    assert "round 1/1" in capfd.readouterr().out


@pytest.mark.slow
def test_the_benchmark_measures_the_floor_and_a_million_parameters(tmp_path: Path) -> None:
    rows = deployment.rows(nodes=1, rounds=1, folder=tmp_path / "federation")
    names = [f"{what}, apps {how}" for how in ("started anew", "ready") for what in ("floor", "ours")]
    assert [(row["what"], row["replies"]) for row in rows] == [(name, 1) for name in names]
    assert all(row["ratio"] == row["seconds"] / rows[0]["seconds"] for row in rows)
    assert all(row[name] > 0 for row in rows for name in ("gate", "link", "app"))


def test_the_model_under_load_has_a_million_parameters() -> None:
    size = sum(parameter.numel() for parameter in million((1, 8, 8), 10).parameters())
    assert 0.999e6 < size <= 1e6
