"""The benchmark of private loops: what it compares is the same work, and its rows say what was compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import loop_speed
from benchmarks.opacus_steps import OPACUS_MODES


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
