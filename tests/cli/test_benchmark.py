"""The benchmark runs and writes what it measured. No time decides anything here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import per_example_speed as per_example
from discreet.cli.main import main


def test_sections_are_written_as_json_and_an_unknown_one_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(per_example, "rows", lambda: [{"what": "something", "ms": 1.5}])
    assert main(["benchmark", "per_example", "--json", str(tmp_path / "out.json")]) == 0
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["per_example"] == [{"what": "something", "ms": 1.5}]
    assert written["machine"]["cores"] >= 1
    assert main(["benchmark", "weather"]) == 2
    assert "no section weather; known are per_example, loop" in capsys.readouterr().err
