"""The ledger on disk: what is written stays, and what was changed is found."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
from dp_accounting import GaussianDpEvent, LaplaceDpEvent, PoissonSampledDpEvent

from discreet.ledger.durable_ledger import Charge, DurableLedger, LedgerError
from discreet.ledger.rollback_guard import STATE_VARIABLE, RollbackGuard, connected
from discreet.run_files.compose import load_asked
from discreet.run_files.ledger_copy import copy_ledger
from discreet.run_files.opening import only_writer
from discreet.simulation.in_process import simulate
from tests.ledger.charging import charge

WRITERS, FILES = 4, 10
EVENT = PoissonSampledDpEvent(0.5, GaussianDpEvent(2.0))
FACTS = {"privacy.delta": 1e-3, "sampling.probability": 0.5}


@pytest.fixture
def ledger(tmp_path: Path) -> DurableLedger:
    made = DurableLedger.create(tmp_path / "ledger.db", facts=FACTS)
    made.charge([Charge(number, "user", "", EVENT) for number in (1, 2, 3)])
    made.charge([Charge(3, "local", "7", LaplaceDpEvent(0.5), 2)])
    return made


def edit(ledger: DurableLedger, statement: str) -> None:
    with closing(sqlite3.connect(ledger.path)) as connection, connection:
        connection.execute(statement)


READ_ONLY = """
import sys
from discreet.cli.main import main
run, copy = sys.argv[1:]
verbs = "status", "ledger show", "ledger verify", "ledger export"
assert not any(main([*verb.split(), run]) for verb in verbs)
assert main(["ledger", "backup", f"{run}/ledger.db", copy]) == 0
assert main(["ledger", "adopt", run]) == 2
"""
MOUNTED = (
    'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" || exit 77; "$2" -c "$3" "$1" "$4"'
)


@pytest.mark.processes
def test_a_run_on_a_disk_that_is_read_only_is_read_and_not_adopted(tmp_path: Path) -> None:
    run = tmp_path / "run"
    simulate(
        *load_asked(
            ["rounds=1", "data.num_clients=20", "privacy.user.too_noisy=warn", f"output_dir={run}"]
        )
    )
    words = [
        "unshare",
        "-m",
        "bash",
        "-c",
        MOUNTED,
        "bash",
        str(run),
        sys.executable,
        READ_ONLY,
        str(tmp_path / "copy.db"),
    ]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if done.returncode in (1, 77) and ("unshare failed" in done.stderr or "mount" in done.stderr):
        pytest.skip("this user can't mount a folder")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 rows, the chain is intact" in done.stdout
    assert (
        DurableLedger(tmp_path / "copy.db").position()
        == DurableLedger(run / "ledger.db").position()
    )


def test_where_nothing_can_be_written_the_rows_beside_the_file_are_read_too(
    ledger: DurableLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An open connection keeps SQLite from moving the newest rows into the file.
    with closing(sqlite3.connect(ledger.path)) as other:
        other.execute("select * from facts").fetchone()
        ledger.charge([Charge(4, "user", "", EVENT)])
        assert ledger.path.with_name("ledger.db-wal").stat().st_size > 0
        monkeypatch.setattr(os, "access", lambda *_: False)
        assert ledger.spent("user").num_releases == 4
        assert ledger.verify() == []


def test_what_was_charged_is_there_for_the_next_process(ledger: DurableLedger) -> None:
    again = DurableLedger(ledger.path, facts=FACTS)
    assert again.spent("user").entries == ((EVENT, 3),)
    assert again.spent("local", data_owner="7").entries == ((LaplaceDpEvent(0.5), 2),)
    assert again.spent("example").entries == ()


TAMPERING = {
    "a changed event": (
        """update releases set event = '{"kind":"gaussian","noise_multiplier":9.0}' """
        "where number = 2"
    ),
    "a changed count": "update releases set count = 1 where number = 4",
    "a changed round": "update releases set round = 9 where number = 1",
    "a deleted row": "delete from releases where number = 2",
    "a deleted last row": "delete from releases where number = 4",
    "an added row": "insert into releases select 5, 9, guarantee, '', event, 1, nonce, digest "
    "from releases limit 1",
    "changed settings": "update facts set value = '1e-9' where name = 'privacy.delta'",
}


@pytest.mark.parametrize("statement", TAMPERING.values(), ids=TAMPERING.keys())
def test_tampering_is_found(ledger: DurableLedger, statement: str) -> None:
    edit(ledger, statement)
    assert len(ledger.verify()) == 1


def test_other_privacy_settings_are_refused_with_what_differs(ledger: DurableLedger) -> None:
    with pytest.raises(LedgerError, match=r"sampling.probability was 0.5, is 0.25"):
        DurableLedger(ledger.path, facts=FACTS | {"sampling.probability": 0.25})


def test_a_file_that_is_no_ledger_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ledger.db").write_text(
        "this is not a database, and long enough to be looked at as one" * 20
    )
    with pytest.raises(LedgerError, match="can't be used"):
        DurableLedger(tmp_path / "ledger.db")


def test_a_charge_that_fails_leaves_nothing(ledger: DurableLedger) -> None:
    head = ledger.position().head
    with pytest.raises(ValueError, match="event"):
        ledger.charge([Charge(4, "user", "", EVENT), Charge(4, "user", "", object())])  # type: ignore[arg-type]
    assert ledger.position().head == head
    assert ledger.verify() == []


def test_a_charge_has_reached_the_disk_when_it_returns(
    ledger: DurableLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In WAL mode SQLite flushes a commit to the disk with `synchronous` full (2) or extra (3), not
    with normal (1)."""
    found = []

    class Watched(sqlite3.Connection):
        def close(self) -> None:
            if self.execute("pragma database_list").fetchone()[2] == str(ledger.path.resolve()):
                found.append(
                    (
                        *self.execute("pragma journal_mode").fetchone(),
                        *self.execute("pragma synchronous").fetchone(),
                    )
                )
            super().close()

    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Watched))
    ledger.charge([Charge(4, "user", "", EVENT)])
    assert ledger.charge([Charge(4, "example", "1", EVENT)], since=ledger.position())
    assert set(found) <= {("wal", 2), ("wal", 3)}
    assert len(found) >= 2


def test_a_full_disk_at_the_commit_of_this_machines_record_is_told_in_one_line(
    ledger: DurableLedger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(sqlite3.Connection):
        def __exit__(self, *_: object) -> Literal[False]:
            raise sqlite3.OperationalError("database or disk is full")

    position = ledger.position()
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Full))
    with (
        pytest.raises(LedgerError, match=r"ledgers\.db, where this machine .* disk is full"),
        RollbackGuard.opened() as known,
    ):
        known.enter(position, tmp_path)


@pytest.mark.processes
def test_processes_that_write_at_once_keep_one_chain(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    path = tmp_path / "clients.db"
    DurableLedger.create(path)
    workers = [context.Process(target=charge, args=(path, str(number), 20)) for number in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    ledger = DurableLedger(path)
    assert ledger.verify() == []
    spent = [
        ledger.spent("example", data_owner=owner).num_releases
        for owner in ledger.data_owners("example")
    ]
    assert spent == [20] * 3


def test_a_ledger_its_copy_and_the_folders_that_are_made_for_it_are_its_owners_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "known"))
    before = os.umask(0)
    try:
        ledger = DurableLedger.create(tmp_path / "node" / "ledger.db")
        copy_ledger(ledger.path, tmp_path / "node" / "copy.db")
        with only_writer(tmp_path / "run"), connected(ledger.path) as connection:
            connection.execute("begin immediate")
            rights = {
                path.name: path.stat().st_mode & 0o77
                for path in tmp_path.rglob("*")
                if path.name != "lock"
            }
    finally:
        os.umask(before)
    assert {"run", "known", "ledgers.db", "copy.db", "ledger.db-wal"} <= rights.keys()
    assert set(rights.values()) == {0}


def test_a_ledger_is_made_by_one_of_several_that_try_at_once(tmp_path: Path) -> None:
    barrier = threading.Barrier(WRITERS)

    def make(_: int) -> int:
        barrier.wait()
        try:
            return len(DurableLedger.create(path).releases())
        except LedgerError as error:
            return int("exists already" in str(error))

    with ThreadPoolExecutor(WRITERS) as pool:
        for attempt in range(FILES):
            path = tmp_path / f"{attempt}.db"
            assert sum(pool.map(make, range(WRITERS))) == WRITERS - 1
            DurableLedger(path).check()
