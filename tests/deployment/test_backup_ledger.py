"""A copy of a ledger is whole while the ledger is written, and is never made over another."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent

from discreet.deployment.backup_ledger import main
from discreet.ledger.durable_ledger import Charge, DurableLedger


@pytest.fixture
def ledger(tmp_path: Path) -> DurableLedger:
    ledger = DurableLedger.create(tmp_path / "ledger.db")
    for number in range(1, 4):
        ledger.charge([Charge(number, "example", "", GaussianDpEvent(2.0))])
    return ledger


def test_the_copy_holds_every_row_while_the_ledger_is_open(
    ledger: DurableLedger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reader = sqlite3.connect(ledger.path)
    reader.execute("begin")
    reader.execute("select * from releases").fetchone()
    ledger.charge([Charge(4, "example", "", GaussianDpEvent(2.0))])
    assert main([str(ledger.path), str(tmp_path / "copy.db")]) == 0
    reader.close()
    copy = DurableLedger(tmp_path / "copy.db")
    assert copy.releases() == ledger.releases()
    assert f"4 rows, head {ledger.position().head}" in capsys.readouterr().out


def test_nothing_is_overwritten_and_a_damaged_or_missing_ledger_is_not_passed_on_in_silence(
    ledger: DurableLedger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy.db"
    copy.write_text("kept")
    assert main([str(ledger.path), str(copy)]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert copy.read_text() == "kept"
    copy.unlink()
    assert main([str(tmp_path / "none.db"), str(copy)]) == 2
    connection = sqlite3.connect(ledger.path)
    connection.execute("update releases set count = 0 where number = 2")
    connection.commit()
    connection.close()
    assert main([str(ledger.path), str(copy)]) == 2
    assert "is damaged" in capsys.readouterr().err
