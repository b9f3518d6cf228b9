"""What reads a run's folder: report, status, and what they say of files that are broken."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent

from discreet.accounting.privacy_ledger import PrivacyLedger
from discreet.cli.main import main
from discreet.cli.status import status_facts, status_lines
from discreet.ledger.durable_ledger import Charge, DurableLedger
from discreet.server.population_account import ADJACENCIES, Population, create_account
from tests.command import report
from tests.made_runs import make_run

NOISE = "privacy.user.noise_multiplier"


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    for number, noise in enumerate((1, 2)):
        make_run(tmp_path / "sweep" / str(number), f"{NOISE}={noise}", accuracies=(0.4, 0.8 - noise / 10))
    return tmp_path / "sweep"


def test_a_sweep_becomes_a_page_a_table_and_pictures(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(sweep), "--csv", str(sweep / "runs.csv"), "--pictures", str(sweep / "pictures")]
    assert report(words) == 0
    printed = capsys.readouterr().out
    assert "0.6000" in printed
    assert "choosing the best: epsilon" in printed
    assert (sweep / "report.html").read_text().startswith("<!doctype html>")
    rows = list(csv.DictReader((sweep / "runs.csv").read_text().splitlines()))
    assert [row["accuracy"] for row in rows] == ["0.7000", "0.6000"]
    assert list((sweep / "pictures").glob("*.svg"))


WORDS = ("data.num_clients=20", "privacy.user.noise_multiplier=4", "sampling.kind=everyone")


def test_the_account_is_shown_with_what_is_left_of_it(tmp_path: Path) -> None:
    path = tmp_path / "people.db"
    create_account(path, Population("people", 20, ADJACENCIES[0], 1e-3))
    DurableLedger(path).charge([Charge(1, "user", "a run 12ab", GaussianDpEvent(4.0), 3)])
    words = (f"privacy.user.account={path}", "sampling.population_name=people", "privacy.user.max_epsilon=4")
    folder = make_run(tmp_path / "run", *WORDS, *words)
    spent = PrivacyLedger(((GaussianDpEvent(4.0), 3),)).epsilon(1e-3)
    facts = status_facts(folder)["account"]
    assert isinstance(facts, dict)
    assert (facts["runs"], facts["spent"], facts["left"]) == (1, pytest.approx(spent), pytest.approx(4 - spent))
    (line,) = (line for line in status_lines(folder) if line.startswith("account"))
    assert line == f"account    all runs on people (1) {spent:.4g} spent, {4 - spent:.4g} of 4 left"
    assert any(line.endswith("spent; its budget is that of all runs") for line in status_lines(folder))
    without = make_run(tmp_path / "without", *WORDS)
    assert status_facts(without)["account"] is None
    assert not any(line.startswith("account") for line in status_lines(without))


READERS = (("report",), ("status",), ("ledger", "show"))
UNREAD = {("ledger", "show", "metrics.csv"), ("ledger", "show", "privacy.json"), ("status", "privacy.json")}
DAMAGES = [
    ("config.yaml", b"rounds: [1"),
    ("config.yaml", b"- 1\n- 2\n"),
    ("config.yaml", b"runds: 3\n"),
    ("config.yaml", b"\xff\xfe\x00"),
    ("config.yaml", b"rounds: ${rounds}\n"),
    ("metrics.csv", b"round,loss,accuracy\n1,0.5,high\n"),
    ("metrics.csv", b"number,loss\n1,0.5\n"),
    ("metrics.csv", b"round,loss,accuracy\n1\n2,0.5,0.5\n"),
    ("metrics.csv", b"\x00\x01\xff\n\xfe"),
    ("privacy.json", b"{"),
]


@pytest.mark.parametrize("reader", READERS, ids=" ".join)
def test_a_broken_file_of_a_run_is_one_line(
    reader: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run", "privacy.user.noise_multiplier=1")
    for file, content in DAMAGES:
        whole = (tmp_path / "run" / file).read_bytes() if (tmp_path / "run" / file).exists() else b"{}"
        (tmp_path / "run" / file).write_bytes(content)
        code, error = main([*reader, str(tmp_path / "run")]), capsys.readouterr().err
        (tmp_path / "run" / file).write_bytes(whole)
        if (*reader, file) in UNREAD:
            assert (code, error) == (0, "")
        else:
            assert code == 2
            assert error.startswith(f"discreet: {tmp_path / 'run' / file} is damaged: ")
            assert error.count("\n") == 1
