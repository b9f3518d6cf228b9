"""Tests that the model fits the data, and that a short run keeps to its budget."""

from __future__ import annotations

import csv
import tomllib
from pathlib import Path

import pytest
import torch
from model import build

import discreet

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    # conf/ and the paths in it are relative to the working folder.
    monkeypatch.chdir(ROOT)


def test_the_model_takes_the_data() -> None:
    data = tomllib.loads((ROOT / "data" / "data.toml").read_text())
    inputs, classes = len(data["inputs"]), len(data["classes"])
    assert build((inputs,), classes)(torch.zeros(5, inputs)).shape == (5, classes)


def test_a_short_run_stays_within_its_budget(tmp_path: Path) -> None:
    folder = discreet.simulate(
        "experiment=quick", "privacy.user.target_epsilon=8", f"output_dir={tmp_path / 'run'}"
    )
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["round"] for row in rows] == ["1", "2"]
    assert 0 < float(rows[-1]["epsilon_user"]) <= 8


def test_a_setting_that_is_misspelt_is_refused() -> None:
    with pytest.raises(discreet.ConfigError, match="did you mean rounds"):
        discreet.simulate("rouns=1")
