"""What this machine knows of the ledgers that it charges: how far each one has come, kept apart from the ledgers.

A ledger that was put back from an older copy, or one of two copies that were both charged, is whole in itself: only
something that is not copied along can tell. That is a small SQLite file in a folder of the user's own. It holds no
events: for each ledger its identity, where it lies, its number of rows and its head digest.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

STATE_VARIABLE = "DISCREET_STATE"
LOCK_SECONDS = 60.0  # how long a process waits for the others that use the same file
SCHEMA = """
create table ledgers (identity text primary key, path text not null, rows integer not null, head text not null)
without rowid;
create index by_path on ledgers (path);
"""


class LedgerError(ValueError):
    """A ledger file is missing, damaged, older than it was, or belongs to another run."""


@dataclass(frozen=True)
class Mark:
    """How far a ledger had come: its identity, its number of rows, and the digest of the last one."""

    identity: str
    rows: int
    head: str


def state_folder() -> Path:
    """DISCREET_STATE, or else `discreet` in the user's folder for state."""
    named = os.environ.get(STATE_VARIABLE)
    if named:
        return Path(named)
    try:
        return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "discreet"
    except RuntimeError as error:
        raise LedgerError(f"{STATE_VARIABLE} must name a folder: this user has no home") from error


def recall(identity: str) -> Mark | None:
    """How far a ledger had come when this machine charged it last; None for one that it never charged."""
    with _notes() as notes:
        row = notes.execute("select identity, rows, head from ledgers where identity = ?", (identity,)).fetchone()
    return None if row is None else Mark(*row)


def another_at(path: Path, identity: str) -> bool:
    """Whether the ledger that this machine knows at a path is another one."""
    with _notes() as notes:
        query = "select count(*) from ledgers where path = ? and identity != ?"
        (count,) = notes.execute(query, (str(path.resolve()), identity)).fetchone()
    return bool(count)


def enter(mark: Mark, path: Path) -> None:
    """Takes down a ledger that is new to this machine, or at a new path. Of another one there the path is forgotten."""
    with _notes() as notes, notes:
        notes.execute("begin immediate")
        notes.execute("update ledgers set path = '' where path = ?", (str(path.resolve()),))
        row = (mark.identity, str(path.resolve()), mark.rows, mark.head)
        notes.execute("insert or replace into ledgers values (?, ?, ?, ?)", row)


def note(mark: Mark, path: Path, *, since: Mark) -> Mark | None:
    """Takes down that a ledger has come from `since` to `mark`, and gives what is known of it then.

    That is something else than `mark` where another process has noted another step from `since` meanwhile.
    """
    change = "update ledgers set path = ?, rows = ?, head = ? where identity = ? and head = ?"
    with _notes() as notes:
        notes.execute(change, (str(path.resolve()), mark.rows, mark.head, mark.identity, since.head))
    return recall(mark.identity)


@contextmanager
def _notes() -> Iterator[sqlite3.Connection]:
    path = state_folder() / "ledgers.db"
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            make_database(path, SCHEMA)
        # Not flushed to disk: where a power cut takes a note away, the ledger is ahead of it, which is no fault.
        with closing(sqlite3.connect(path, timeout=LOCK_SECONDS, isolation_level=None)) as notes:
            notes.execute("pragma synchronous = normal")
            yield notes
    except (OSError, sqlite3.DatabaseError) as error:
        what = f"{path}, where this machine notes how far its ledgers have come, can't be used: {error}"
        raise LedgerError(f"{what}; {STATE_VARIABLE} names another folder") from error


def make_database(path: Path, script: str, rows: Sequence[tuple[str, Sequence[object]]] = ()) -> bool:
    """Makes an SQLite file in WAL mode, whole or not at all; False where there is a file already.

    Raises:
      OSError, sqlite3.DatabaseError: it can't be made.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with closing(sqlite3.connect(beside, isolation_level=None)) as connection:
            connection.execute("pragma journal_mode = wal")
            connection.execute("pragma synchronous = full")
            connection.executescript(script)
            for statement, values in rows:
                connection.execute(statement, values)
        os.link(beside, path)  # unlike a rename it replaces nothing
    except FileExistsError:
        return False
    finally:
        beside.unlink(missing_ok=True)
    return True
