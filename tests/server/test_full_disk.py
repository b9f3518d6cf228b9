"""A disk that is full interrupts a run in one line, with the command that goes on; nothing is left half made."""

from __future__ import annotations

import errno
import os
import shlex
import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from dp_accounting import GaussianDpEvent
from flwr.app import Context, RecordDict

from discreet.flower import serving
from discreet.ledger import durable_ledger, rollback_guard
from discreet.ledger.durable_ledger import Charge, DurableLedger, LedgerError
from discreet.ledger.rollback_guard import STATE_VARIABLE
from discreet.protocol import run_end
from discreet.server import run_folder
from discreet.server.run_folder import RunFolder, state_of
from discreet.settings.compose import load_config
from tests.command import simulate

SETTINGS = (
    *("data.num_clients=5", "privacy.delta=0.01", "model.name=logistic_regression", "rounds=3", "seed=40127"),
    *("privacy.user.noise_multiplier=0.5", "privacy.user.max_epsilon=1e6"),
)
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/the/disk")


class Full(sqlite3.Connection):
    """A database that has no room for a second charge."""

    def executemany(self, statement: str, *words: object) -> sqlite3.Cursor:
        if "releases" in statement and self.execute("select count(*) from releases").fetchone()[0]:
            self.execute(f"pragma max_page_count = {self.execute('pragma page_count').fetchone()[0]}")
            self.execute("insert into facts values ('long', ?)", ("x" * 10**6,))
        return super().executemany(statement, *words)  # type: ignore[arg-type]


def no_room_for_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    replace, seen = run_folder.replace_file, list[str]()

    def replace_until_full(path: Path, content: bytes, **how: Any) -> None:
        seen.append(path.name)
        if seen.count("state.safetensors") > 1:
            raise FULL
        replace(path, content, **how)

    import_module("discreet.cli.sweep")  # what it has of the name is not to be this one for good
    monkeypatch.setattr(run_folder, "replace_file", replace_until_full)


def no_room_in_the_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Full))


@pytest.mark.parametrize("no_room", [no_room_for_a_checkpoint, no_room_in_the_ledger])
def test_a_run_on_a_full_disk_says_in_one_line_how_it_goes_on_and_goes_on_so(
    no_room: Callable[[pytest.MonkeyPatch], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = RunFolder(tmp_path / "run")
    with monkeypatch.context() as until_room:
        no_room(until_room)
        with pytest.raises(SystemExit) as ended:
            simulate([*SETTINGS, f"output_dir={folder.path}"])
    said = capsys.readouterr()
    assert (ended.value.code, said.err) == (1, "")
    reason, _, command = said.out.splitlines()[-1].partition("; to go on: discreet simulate ")
    assert reason.startswith("interrupted after round 1 (")
    assert "disk is full" in reason or os.strerror(errno.ENOSPC) in reason
    assert simulate(shlex.split(command)) == 0
    assert [row["round"] for row in folder.read_metrics()] == [1, 2, 3]
    assert state_of(folder) == "finished"


def test_a_server_app_ends_with_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*_: object, **__: object) -> None:
        raise FULL

    def leave(*_: object) -> None:
        raise SystemExit

    monkeypatch.setattr(serving, "run", run)
    monkeypatch.setattr(run_end, "flwr_exit", leave)
    monkeypatch.setattr(serving, "config_of", lambda *_, **__: load_config(()))
    context = Context(1, 1, {}, RecordDict(), {})
    with pytest.raises(SystemExit):
        serving.serve(object(), context, strategy=None)  # type: ignore[arg-type]
    assert capsys.readouterr().out == f"discreet: {FULL}\n"


@pytest.mark.parametrize("place", ["the rollback guard", "the folder", "the first look"])
def test_a_ledger_that_can_not_be_made_leaves_no_file(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise FULL

    folder = tmp_path / "made"
    if place == "the rollback guard":
        (tmp_path / "file").touch()
        monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "file"))
    elif place == "the folder":
        monkeypatch.setattr(durable_ledger, "flush_folder", no_room)
    else:
        monkeypatch.setattr(DurableLedger, "facts", lambda _: no_room())
    with pytest.raises((LedgerError, OSError)):
        DurableLedger.create(folder / "ledger.db")
    assert list(folder.iterdir()) == []
    monkeypatch.undo()
    assert DurableLedger.create(folder / "ledger.db").verify() == []


def test_a_new_ledger_is_whole_without_what_sqlite_keeps_beside_it(tmp_path: Path) -> None:
    # On a full disk SQLite gives up, without a word, copying its log into the file at the end, as if another read it.
    connect, readers = sqlite3.connect, list[sqlite3.Connection]()

    class Read(sqlite3.Connection):
        def close(self) -> None:
            readers.append(connect(self.execute("pragma database_list").fetchone()[2]))
            readers[-1].execute("select count(*) from sqlite_schema")
            super().close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", partial(connect, factory=Read))
        rollback_guard.make_database(tmp_path / "new.db", durable_ledger.SCHEMA)
    with closing(connect(tmp_path / "new.db")) as connection, closing(readers[0]):
        assert connection.execute("select count(*) from releases").fetchone() == (0,)


@pytest.mark.parametrize(
    "change", ["event = cast(event as blob)", "event = 'gaussian'", "count = 0.5", "round = x'01'"]
)
def test_a_value_that_is_none_of_its_column_is_an_error_of_the_ledger(change: str, tmp_path: Path) -> None:
    ledger = DurableLedger.create(tmp_path / "ledger.db")
    ledger.charge([Charge(1, "user", "", GaussianDpEvent(1.0))])
    with sqlite3.connect(ledger.path) as connection:
        connection.execute(f"update releases set {change}")
    with pytest.raises(LedgerError, match=f"{ledger.path} .*is damaged"):
        _ = ledger.check() if "round" in change else ledger.spent("user")


def test_what_this_machine_knows_of_ledgers_may_be_damaged_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "known"))
    ledger = DurableLedger.create(tmp_path / "ledger.db")
    with sqlite3.connect(tmp_path / "known" / "ledgers.db") as connection:
        connection.execute("update ledgers set rows = 'few'")
    with pytest.raises(LedgerError, match=r"ledgers\.db.* it is damaged, rows is of type str"):
        ledger.charge([Charge(1, "user", "", GaussianDpEvent(1.0))])
