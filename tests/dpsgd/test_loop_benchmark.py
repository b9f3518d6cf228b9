"""The benchmark of private loops: what it compares is the same work, and its rows say what was compared."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from benchmarks import loop_speed
from benchmarks.opacus_steps import OPACUS_MODES

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.slow
def test_every_comparison_has_a_row_and_a_peer_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    loop_speed.main(["--models", "embedding", "--rounds", "1", "--json", str(tmp_path / "times.json")])
    found = json.loads((tmp_path / "times.json").read_text())
    assert [row["what"] for row in found if "ms" in row] == ["plain step", "DPSGD.step", "noise"]
    assert [row["what"] for row in found if "reason" in row] == [f"Opacus {mode}" for mode in OPACUS_MODES]
    assert "DPSGD.step" in capsys.readouterr().out


@pytest.mark.slow
def test_the_example_trains(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "dpsgd" / "train.py"), run_name="__main__")
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("epsilon 3.000 at delta 1e-4")
    assert float(said.split()[-1]) > 0.6
