"""The grid behind docs/noise.md: runs are measured, added to a table, and drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import noise_drive

TINY = "rounds=1 training.epochs=1 model.name=logistic_regression data.num_clients=20"
PUBLISHED = Path(__file__).resolve().parents[2] / "docs" / "results" / "noise_drive.csv"


def test_a_run_is_measured_and_added_to_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise_drive, "SEEDS", (31013,))
    assert noise_drive.main(["--only", TINY, "--out", str(tmp_path / "runs.csv")]) == 0
    (row,) = noise_drive.read_rows(tmp_path / "runs.csv")
    assert (row["settings"], row["seed"], row["refused"], row["rounds"]) == (TINY, "31013", "False", "1")
    assert row["accuracy"] == row["best_accuracy"]


def test_the_published_runs_are_drawn_with_a_line_for_each_epsilon(tmp_path: Path) -> None:
    picture = tmp_path / "noise.svg"
    assert noise_drive.main(["--from", str(PUBLISHED), "--picture", str(picture)]) == 0
    text = picture.read_text()
    for epsilon in ("8", "2", "1", "0.5"):
        assert f"epsilon {epsilon}<" in text
        assert f"epsilon {epsilon}, server.shrink_with_noise<" in text
