"""What reads a run's folder: report, status, and what they say of files that are broken."""

from __future__ import annotations

import csv
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent, LaplaceDpEvent, get_epsilon_gaussian

from discreet.accounting.privacy_ledger import PrivacyLedger
from discreet.cli.main import main
from discreet.cli.status import status_facts, status_lines
from discreet.ledger.durable_ledger import Charge, DurableLedger
from discreet.server.population_account import ADJACENCIES, Population, create_account
from tests.command import ledger as ledger_command
from tests.command import report
from tests.made_runs import make_run

NOISE = "privacy.user.noise_multiplier"


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    for number, noise in enumerate((1, 2)):
        make_run(
            tmp_path / "sweep" / str(number), f"{NOISE}={noise}", accuracies=(0.4, 0.8 - noise / 10)
        )
    return tmp_path / "sweep"


def test_a_sweep_becomes_a_page_a_table_and_pictures(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(sweep), "--csv", str(sweep / "runs.csv"), "--pictures", str(sweep / "pictures")]
    assert report(words) == 0
    printed = capsys.readouterr().out
    assert "0.6000" in printed
    assert "choosing the best: epsilon" in printed
    assert (sweep / "report.html").read_text().startswith("<!doctype html>")
    rows = list(csv.DictReader((sweep / "runs.csv").read_text().splitlines()))
    assert [row["accuracy"] for row in rows] == ["0.7000", "0.6000"]
    assert list((sweep / "pictures").glob("*.svg"))


def test_what_can_not_be_written_is_named_by_its_option(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = sweep / "a file"
    file.touch()
    nowhere = sweep / "nowhere" / "x.csv"
    for option, path, reason in (
        ("--csv", nowhere, "No such file or directory"),
        ("--csv", sweep, "Is a directory"),
        ("--pictures", file, "File exists"),
    ):
        assert report([str(sweep), option, str(path)]) == 2
        said = capsys.readouterr().err
        assert f"{option}: {path} can't be written ({reason}): name a " in said


WORDS = ("data.num_clients=20", "privacy.user.noise_multiplier=4", "sampling.kind=everyone")


def test_the_account_is_shown_with_what_is_left_of_it(tmp_path: Path) -> None:
    path = tmp_path / "people.db"
    create_account(path, Population("people", 20, ADJACENCIES[0], 1e-3))
    DurableLedger(path).charge([Charge(1, "user", "a run 12ab", GaussianDpEvent(4.0), 3)])
    words = (
        f"privacy.user.account={path}",
        "sampling.population_name=people",
        "privacy.user.max_epsilon=4",
    )
    folder = make_run(tmp_path / "run", *WORDS, *words)
    spent = PrivacyLedger(((GaussianDpEvent(4.0), 3),)).epsilon(1e-3)
    facts = status_facts(folder)["account"]
    assert isinstance(facts, dict)
    assert (facts["runs"], facts["spent"], facts["left"]) == (
        1,
        pytest.approx(spent),
        pytest.approx(4 - spent),
    )
    (line,) = (line for line in status_lines(folder) if line.startswith("account"))
    assert line == f"account    all runs on people (1) {spent:.4g} spent, {4 - spent:.4g} of 4 left"
    assert any("its budget is that of all runs" in line for line in status_lines(folder))
    without = make_run(tmp_path / "without", *WORDS)
    assert status_facts(without)["account"] is None
    assert not any(line.startswith("account") for line in status_lines(without))


READERS = (("report",), ("status",), ("ledger", "show"))
UNREAD = {
    ("ledger", "show", "config.yaml"),  # the ledger itself says the run's delta
    ("ledger", "show", "metrics.csv"),
    ("ledger", "show", "privacy.json"),
    ("status", "privacy.json"),
}
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
        whole = (
            (tmp_path / "run" / file).read_bytes() if (tmp_path / "run" / file).exists() else b"{}"
        )
        (tmp_path / "run" / file).write_bytes(content)
        code, error = main([*reader, str(tmp_path / "run")]), capsys.readouterr().err
        (tmp_path / "run" / file).write_bytes(whole)
        if (*reader, file) in UNREAD:
            assert (code, error) == (0, "")
        else:
            assert code == 2
            assert error.startswith(f"discreet: {tmp_path / 'run' / file} is damaged: ")
            assert error.count("\n") == 1


@pytest.fixture
def run(tmp_path: Path) -> Path:
    ledger = DurableLedger.create(tmp_path / "ledger.db")
    ledger.charge([Charge(number, "user", "", GaussianDpEvent(3.0)) for number in (1, 2)])
    DurableLedger.create(tmp_path / "clients.db").charge(
        [Charge(1, "local", "4", LaplaceDpEvent(2.0))]
    )
    return tmp_path


def test_show_gives_every_guarantee_with_its_epsilon(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ledger_command(["show", str(run), "--delta", "1e-3"]) == 0
    printed = capsys.readouterr().out
    assert "user-level: 2 x GaussianDpEvent(noise_multiplier=3.0)\n" in printed
    assert "local-level, client 4: 1 x LaplaceDpEvent(noise_multiplier=2.0)\n" in printed
    assert "pure epsilon 0.5" in printed  # of the one Laplace release
    assert "{" not in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["show", "RUN", "--delta", "5"], "--delta must be within (0, 1) (got 5"),
        (["backup", "RUN"], "backup needs a second file"),
        (["create", "new.db", "--max-epsilon", "4"], "go with --population; the limit of a node"),
        (["create", "new.db", "--replace"], "go with --population"),
        (["show", "RUN", "copy.db"], "only backup takes a second file"),
    ],
)
def test_a_wrong_word_about_a_ledger_is_told(
    words: list[str], said: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ledger_command([str(run) if word == "RUN" else word for word in words]) == 2
    assert said in capsys.readouterr().err


def test_verify_finds_a_changed_row(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [ledger_command(["verify", str(given)]) for given in (run, run / "clients.db")] == [0, 0]
    with closing(sqlite3.connect(run / "ledger.db")) as connection, connection:
        connection.execute("update releases set count = 0 where number = 1")
    assert ledger_command(["verify", str(run)]) == 1
    assert "does not fit the chain" in capsys.readouterr().out


def test_export_gives_every_row_as_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ledger_command(["export", str(run)]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["guarantee"] for row in rows] == ["user", "user", "local"]
    assert rows[0]["event"] == {"kind": "gaussian", "noise_multiplier": 3.0}


def test_a_new_ledger_in_place_of_one_that_was_charged_is_made_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "node.db"
    assert ledger_command(["create", str(path)]) == 0
    assert "warning" not in capsys.readouterr().out
    path.unlink()
    assert ledger_command(["create", str(path)]) == 0
    assert "warning: this machine knows another ledger there" in capsys.readouterr().out


def test_an_account_is_made_for_a_population_and_lists_the_runs_and_what_each_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "people.db"
    assert (
        ledger_command(
            ["create", str(path), "--population", "people", "--size", "20", "--delta", "1e-3"]
        )
        == 0
    )
    assert (
        ledger_command(
            ["create", str(path), "--population", "people", "--size", "20", "--delta", "1e-3"]
        )
        == 2
    )
    assert "exists already, and is not overwritten" in capsys.readouterr().err
    event = GaussianDpEvent(3.0)
    runs = (("/runs/second ab", 1), ("/runs/first cd", 2))
    DurableLedger(path).charge(
        [Charge(1, "user", data_owner, event, count) for data_owner, count in runs]
    )
    assert ledger_command(["show", str(path)]) == 0
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
    assert ledger_command(["backup", str(ledger.path), str(copy)]) == 0
    reader.close()
    assert DurableLedger(copy).releases() == ledger.releases()
    assert f"3 rows, head {ledger.position().head}" in capsys.readouterr().out
    for source in (ledger.path, run / "none.db"):
        assert ledger_command(["backup", str(source), str(copy)]) == 2
        assert "nothing is overwritten" in capsys.readouterr().err
    with closing(sqlite3.connect(ledger.path)) as connection, connection:
        connection.execute("update releases set count = 0 where number = 2")
    assert ledger_command(["backup", str(ledger.path), str(run / "other.db")]) == 2
    assert "is damaged" in capsys.readouterr().err
