"""The benchmark of a device ends in time, keeps what it has, and names what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import device_models, device_speed
from benchmarks.people_models import CASES
from discreet.cli.main import main

pytestmark = pytest.mark.processes


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    makers = device_models.device_cases(small=True)
    monkeypatch.setattr(device_speed, "CASES", {"Opacus mnist": CASES["Opacus mnist"]})
    monkeypatch.setattr(device_speed, "device_cases", lambda *, small: {"CNN": makers["CNN"]})
    monkeypatch.setattr(device_speed, "run_rows", lambda bench: iter([{"killed after": 4}]))
    monkeypatch.setattr(device_speed, "TURNS", 1)


def test_each_section_has_rows_in_one_file(few: None, tmp_path: Path) -> None:
    found = device_speed.measure("cpu", small=True, minutes=2, json_file=tmp_path / "found.json")
    assert json.loads((tmp_path / "found.json").read_text()) == found
    assert found["sums"] == [{"model": "Opacus mnist", "error": 0.0}]
    assert found["steps"][0]["DPSGD ms"] > 0
    assert [row["model"] for row in found["cohorts"]] == ["logistic_regression", "mlp", "cnn"]
    assert found["noise"][0]["secure values/s"] > 0


def test_a_model_that_fails_is_named_and_the_next_one_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing() -> None:
        raise ImportError("no such library")

    cases = {"first": missing, "second": CASES["Opacus mnist"]}
    monkeypatch.setattr(device_speed, "CASES", cases)
    bench = device_speed.Bench(torch.device("cpu"), True, device_speed.time.monotonic() + 60, 60)
    rows = list(device_speed.sum_rows(bench))
    assert rows[0] == {"model": "first", "missing": "ImportError: no such library"}
    assert rows[1] == {"model": "second", "error": 0.0}


def test_a_section_whose_time_is_over_says_so() -> None:
    bench = device_speed.Bench(torch.device("cpu"), True, device_speed.time.monotonic(), 60)
    assert all("TimeoutError" in row["missing"] for row in device_speed.cohort_rows(bench))


def test_a_device_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["benchmark", "device"]) == 2
    assert "--device cuda needs a GPU" in capsys.readouterr().err
    assert main(["benchmark", "device", "--device", "tpu"]) == 2
    assert "--device must be cuda, cuda:N or cpu (got tpu)" in capsys.readouterr().err
