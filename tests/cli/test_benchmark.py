"""The benchmark runs and writes what it measured. No time decides anything here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import ledger_speed as ledger
from benchmarks import masking_speed as masking
from benchmarks import noise_speed as noise
from discreet.cli.benchmark import SECTIONS, main, table_of


def test_the_ledgers_rows_name_what_was_timed() -> None:
    rows = ledger.rows(rounds=50)
    assert [set(row) for row in rows] == [{"what", "ms"}] * 5


def test_noise_is_compared_with_torch() -> None:
    rows = noise.rows(values=1000, params=1000)
    assert rows[0]["what"] == "torch.randn"
    assert all(row["ratio"] > 0 for row in rows)


def test_a_masked_sums_stages_are_timed_apart() -> None:
    rows = masking.rows(values=100, nodes=3)
    assert [row["what"].split(",")[0] for row in rows[3:]] == ["KEYS", "SHARES", "MASKED", "CONFIRM", "UNMASK"]
    assert all(row["ms"] > 0 for row in rows)


def test_sections_are_written_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "rows", lambda: [{"what": "something", "ms": 1.5}])
    assert main(["ledger", "--json", str(tmp_path / "out.json")]) == 0
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["ledger"] == [{"what": "something", "ms": 1.5}]
    assert written["machine"]["cores"] >= 1


def test_an_unknown_section_is_said_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weather"]) == 2
    said = capsys.readouterr().err
    assert all(name in said for name in SECTIONS)


def test_rows_with_different_columns_share_a_table() -> None:
    assert len(table_of([{"a": 1}, {"b": 2.0}]).columns) == 2
