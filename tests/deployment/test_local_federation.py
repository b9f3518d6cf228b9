"""The commands that start a whole federation run, small."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.benchmarks import deployment
from scripts.benchmarks.million import million
from scripts.local_federation import main


@pytest.mark.slow
def test_a_federation_on_this_machine_trains(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--nodes", "1", "rounds=1"]) == 0
    assert "round 1/1" in capfd.readouterr().out


@pytest.mark.slow
def test_the_benchmark_measures_the_floor_and_a_million_parameters(tmp_path: Path) -> None:
    floor, ours = deployment.rows(nodes=1, rounds=1, folder=tmp_path / "federation")
    assert [(row["what"], row["replies"]) for row in (floor, ours)] == [("floor", 1), ("ours", 1)]
    assert ours["ratio"] == ours["seconds"] / floor["seconds"]
    assert all(row[name] > 0 for row in (floor, ours) for name in ("gate", "link", "app"))


def test_the_model_under_load_has_a_million_parameters() -> None:
    size = sum(parameter.numel() for parameter in million((1, 8, 8), 10).parameters())
    assert 0.999e6 < size <= 1e6
