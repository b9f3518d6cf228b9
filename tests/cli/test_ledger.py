"""The ledger's command line."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent, LaplaceDpEvent, get_epsilon_gaussian

from discreet.ledger.durable_ledger import Charge, DurableLedger
from tests.command import ledger as main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    ledger = DurableLedger.create(tmp_path / "ledger.db")
    ledger.charge([Charge(number, "user", "", GaussianDpEvent(3.0)) for number in (1, 2)])
    DurableLedger.create(tmp_path / "clients.db").charge([Charge(1, "local", "4", LaplaceDpEvent(2.0))])
    return tmp_path


def test_show_gives_every_guarantee_with_its_epsilon(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(run), "--delta", "1e-3"]) == 0
    printed = capsys.readouterr().out
    assert "user-level: 2 x GaussianDpEvent(noise_multiplier=3.0)\n" in printed
    assert "local-level, client 4: 1 x LaplaceDpEvent(noise_multiplier=2.0)\n" in printed
    assert "pure epsilon 0.5" in printed  # of the one Laplace release
    assert "{" not in printed


def test_verify_finds_a_changed_row(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [main(["verify", str(given)]) for given in (run, run / "clients.db")] == [0, 0]
    with sqlite3.connect(run / "ledger.db") as connection:
        connection.execute("update releases set count = 0 where number = 1")
    assert main(["verify", str(run)]) == 1
    assert "does not fit the chain" in capsys.readouterr().out


def test_export_gives_every_row_as_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run)]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["guarantee"] for row in rows] == ["user", "user", "local"]
    assert rows[0]["event"] == {"kind": "gaussian", "noise_multiplier": 3.0}


def test_an_account_is_made_for_a_population_and_lists_the_runs_and_what_each_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "people.db"
    assert main(["create", str(path), "--population", "people", "--size", "20", "--delta", "1e-3"]) == 0
    assert main(["create", str(path), "--population", "people", "--size", "20", "--delta", "1e-3"]) == 2
    assert "exists already, and is not made anew" in capsys.readouterr().err
    event = GaussianDpEvent(3.0)
    runs = (("/runs/second ab", 1), ("/runs/first cd", 2))
    DurableLedger(path).charge([Charge(1, "user", data_owner, event, count) for data_owner, count in runs])
    assert main(["show", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "population people: 20 clients, add or remove one client, delta 0.001" in lines
    assert [line for line in lines if line.startswith("run ")] == [
        "run /runs/second: 1 x GaussianDpEvent(noise_multiplier=3.0)",
        "run /runs/first: 2 x GaussianDpEvent(noise_multiplier=3.0)",
    ]
    together = get_epsilon_gaussian(3.0 / 3**0.5, 1e-3)
    assert lines[-2] == "all runs together (2): 3 releases"
    assert lines[-1].startswith(f"  epsilon {together:.4g} by pld")


def test_a_backup_is_whole_while_the_ledger_is_written_and_overwrites_nothing(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger, copy = DurableLedger(run / "ledger.db"), run / "copy.db"
    reader = sqlite3.connect(ledger.path)
    reader.execute("begin")
    reader.execute("select * from releases").fetchone()
    ledger.charge([Charge(3, "user", "", GaussianDpEvent(3.0))])
    assert main(["backup", str(ledger.path), str(copy)]) == 0
    reader.close()
    assert DurableLedger(copy).releases() == ledger.releases()
    assert f"3 rows, head {ledger.position().head}" in capsys.readouterr().out
    for source in (ledger.path, run / "none.db"):
        assert main(["backup", str(source), str(copy)]) == 2
        assert "nothing is overwritten" in capsys.readouterr().err
    with sqlite3.connect(ledger.path) as connection:
        connection.execute("update releases set count = 0 where number = 2")
    assert main(["backup", str(ledger.path), str(run / "other.db")]) == 2
    assert "is damaged" in capsys.readouterr().err
