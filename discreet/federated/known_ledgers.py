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
from typing import Self

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


@dataclass(frozen=True)
class KnownLedgers:
    """An open connection to what this machine knows; close it soon, other processes wait for it."""

    path: Path
    connection: sqlite3.Connection

    @classmethod
    @contextmanager
    def opened(cls) -> Iterator[Self]:
        """Makes the file if it is missing.

        Raises:
          LedgerError: it can't be made or used; so does everything below.
        """
        path = state_folder() / "ledgers.db"
        try:
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                make_database(path, SCHEMA)
            connection = sqlite3.connect(path, timeout=LOCK_SECONDS, isolation_level=None)
        except (OSError, sqlite3.DatabaseError) as error:
            raise _unusable(path, error) from error
        with closing(connection):
            known = cls(path, connection)
            # A note is not flushed to disk: if a power cut takes it away, the ledger is ahead of it, which is no fault.
            known._execute("pragma synchronous = normal")
            yield known

    def _execute(self, statement: str, values: Sequence[object] = ()) -> sqlite3.Cursor:
        try:
            return self.connection.execute(statement, values)
        except sqlite3.DatabaseError as error:
            raise _unusable(self.path, error) from error

    def recall(self, identity: str) -> Mark | None:
        """How far a ledger had come when this machine charged it last; None if it never did."""
        query = "select identity, rows, head from ledgers where identity = ?"
        row = self._execute(query, (identity,)).fetchone()
        return None if row is None else Mark(*row)

    def another_at(self, path: Path, identity: str) -> bool:
        """Whether the ledger that this machine knows at a path is another one."""
        query = "select count(*) from ledgers where path = ? and identity != ?"
        (count,) = self._execute(query, (str(path.resolve()), identity)).fetchone()
        return bool(count)

    def enter(self, mark: Mark, path: Path) -> None:
        """Notes a ledger that is new to this machine, or at a new path. Of another one there the path is forgotten."""
        self._execute("begin immediate")
        with self.connection:
            self._execute("update ledgers set path = '' where path = ?", (str(path.resolve()),))
            row = (mark.identity, str(path.resolve()), mark.rows, mark.head)
            self._execute("insert or replace into ledgers values (?, ?, ?, ?)", row)

    def note(self, mark: Mark, path: Path, *, since: Mark) -> bool:
        """Notes that a ledger has come from `since` to `mark`; False if another process noted a step from `since`."""
        change = "update ledgers set path = ?, rows = ?, head = ? where identity = ? and head = ?"
        values = (str(path.resolve()), mark.rows, mark.head, mark.identity, since.head)
        return self._execute(change, values).rowcount == 1


def _unusable(path: Path, error: Exception) -> LedgerError:
    what = f"{path}, where this machine notes how far its ledgers have come, can't be used: {error}"
    return LedgerError(f"{what}; {STATE_VARIABLE} names another folder")


def make_database(path: Path, script: str, rows: Sequence[tuple[str, Sequence[object]]] = ()) -> bool:
    """Makes an SQLite file in WAL mode, whole or not at all; False if there is a file already.

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
