"""The rollback guard: the last position of each ledger that this machine charges, kept apart from
the ledgers.

A ledger that was restored from an older copy, or one of two copies that were both charged, is
consistent in itself; only a record that is not copied along can reveal it. That record is a small
SQLite file in the user's own state folder. It holds no events: for each ledger its identity, path,
number of rows and head digest.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from discreet.ledger.charges import LedgerDiskError, LedgerError, LedgerPosition

STATE_VARIABLE = "DISCREET_STATE"
LOCK_SECONDS = 60.0  # the time that a process waits for others that use the same file
COPIES = 10  # attempts to copy a ledger that is being written to
SCHEMA = """
create table ledgers (
    identity text primary key, path text not null, rows integer not null, head text not null
) without rowid;
create index by_path on ledgers (path);
"""


RECALL = "select identity, rows, head from ledgers where identity = ?"
OTHERS_AT = "select count(*) from ledgers where path = ? and identity != ?"
COLUMNS: dict[str, type] = dict.fromkeys(
    ("number", "round", "count", "sum(count)", "first", "last", "rows"), int
) | (
    dict.fromkeys(
        (
            "name",
            "value",
            "guarantee",
            "holder",
            "event",
            "nonce",
            "digest",
            "identity",
            "path",
            "head",
        ),
        str,
    )
)


def unusable(what: str, error: Exception) -> LedgerError:
    """The LedgerError for an error of SQLite; `what` is the subject of its message."""
    # The low byte is the code without the details of SQLite's extended codes.
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
        return LedgerDiskError(f"{what}: {error}. Make room on its disk, if it is full")
    return LedgerError(f"{what}: {error}")


def typed(cursor: sqlite3.Cursor, row: tuple[Any, ...]) -> tuple[Any, ...]:
    """A `row_factory` that returns the row as it is. Raises DatabaseError if a value is of another
    type than its column, which SQLite allows."""
    for (name, *_), value in zip(cursor.description, row, strict=True):
        if name in COLUMNS and type(value) is not COLUMNS[name]:
            raise sqlite3.DatabaseError(f"it is damaged, {name} is of type {type(value).__name__}")
    return row


def state_folder() -> Path:
    """DISCREET_STATE, or else `discreet` in the user's state folder."""
    named = os.environ.get(STATE_VARIABLE)
    if named:
        return Path(named)
    try:
        return (
            Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "discreet"
        )
    except RuntimeError as error:
        raise LedgerError(f"{STATE_VARIABLE} must name a folder: this user has no home") from error


@dataclass(frozen=True)
class RollbackGuard:
    """An open connection to this machine's record. Close it soon: other processes wait for it."""

    path: Path
    connection: sqlite3.Connection

    @classmethod
    @contextmanager
    def opened(cls) -> Iterator[Self]:
        """An open guard; its file is made if it is missing.

        Raises:
          LedgerError: the file can't be made or used. The methods below raise it too.
        """
        path = state_folder() / "ledgers.db"
        try:
            if not path.exists():
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                make_database(path, SCHEMA)
            connection = sqlite3.connect(path, timeout=LOCK_SECONDS, isolation_level=None)
            connection.row_factory = typed
        except (OSError, sqlite3.DatabaseError) as error:
            raise _unusable(path, error) from error
        with closing(connection):
            known = cls(path, connection)
            # A note is not flushed to disk: if a power cut loses it, the ledger is ahead of it,
            # which is no fault.
            known._execute("pragma synchronous = normal")
            yield known

    @staticmethod
    def known_here(identity: str, path: Path) -> tuple[LedgerPosition | None, bool]:
        """For readers: a ledger's position after this machine's last charge, and True if this
        machine charged another ledger at the path. None and False if the file is missing or can't
        be read."""
        try:
            address = f"{(state_folder() / 'ledgers.db').absolute().as_uri()}?mode=ro"
            with closing(sqlite3.connect(address, uri=True, timeout=LOCK_SECONDS)) as connection:
                connection.row_factory = typed
                rows = connection.execute(RECALL, (identity,)).fetchall()
                ((others,),) = connection.execute(OTHERS_AT, (str(path.resolve()), identity))
        except (LedgerError, sqlite3.DatabaseError):
            return None, False
        if rows:
            return LedgerPosition(*rows[0]), bool(others)
        return None, bool(others)

    def _execute(self, statement: str, values: Sequence[object] = ()) -> tuple[list[Any], int]:
        """All rows of the result, and the number of changed rows."""
        try:
            done = self.connection.execute(statement, values)
            return done.fetchall(), done.rowcount
        except sqlite3.DatabaseError as error:
            raise _unusable(self.path, error) from error

    def recall(self, identity: str) -> LedgerPosition | None:
        """The position of a ledger after this machine's last charge; None if it never charged
        it."""
        rows, _ = self._execute(RECALL, (identity,))
        if rows:
            return LedgerPosition(*rows[0])
        return None

    def another_at(self, path: Path, identity: str) -> bool:
        """True if this machine knows another ledger at the path."""
        ((count,),), _ = self._execute(OTHERS_AT, (str(path.resolve()), identity))
        return bool(count)

    def enter(self, position: LedgerPosition, path: Path) -> None:
        """Notes a ledger that is new to this machine, or at a new path. The path of another ledger
        that was there is forgotten."""
        self._execute("begin immediate")
        try:
            with self.connection:
                self._execute("update ledgers set path = '' where path = ?", (str(path.resolve()),))
                row = (position.identity, str(path.resolve()), position.rows, position.head)
                self._execute("insert or replace into ledgers values (?, ?, ?, ?)", row)
        except sqlite3.DatabaseError as error:  # a full disk, told at the commit
            raise _unusable(self.path, error) from error

    def note(self, position: LedgerPosition, path: Path, *, since: LedgerPosition) -> bool:
        """Notes that a ledger moved from `since` to `position`; False if another process noted a
        move from `since` first."""
        change = "update ledgers set path = ?, rows = ?, head = ? where identity = ? and head = ?"
        values = (str(path.resolve()), position.rows, position.head, position.identity, since.head)
        return self._execute(change, values)[1] == 1


def _unusable(path: Path, error: Exception) -> LedgerError:
    what = (
        f"{path}, where this machine notes how far its ledgers have come ({STATE_VARIABLE} names "
        "another folder)"
    )
    return unusable(f"{what}, can't be used", error)


def make_database(
    path: Path, script: str, rows: Sequence[tuple[str, Sequence[object]]] = ()
) -> bool:
    """Makes an SQLite file in WAL mode, atomically, readable by this user alone; False if the file
    exists already.

    Raises:
      OSError, sqlite3.DatabaseError: it can't be made.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        beside.touch(mode=0o600)  # SQLite's side files get the same mode
        with closing(sqlite3.connect(beside, isolation_level=None)) as connection:
            connection.execute("pragma synchronous = full")
            connection.executescript(f"begin; {script}")
            for statement, values in rows:
                connection.execute(statement, values)
            connection.execute("commit")
            # Last, so that all that was written is in the file itself.
            connection.execute("pragma journal_mode = wal")
        os.link(beside, path)  # unlike a rename, a link replaces no file
    except FileExistsError:
        return False
    finally:
        remove_database(beside)
    return True


def remove_database(path: Path) -> None:
    """Removes an SQLite file and its side files."""
    for ending in ("", "-wal", "-shm", "-journal"):
        path.with_name(path.name + ending).unlink(missing_ok=True)


@contextmanager
def connected(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection to the ledger in a file. LedgerError: it can't be used."""
    # "rw": a file that was deleted in the meantime is an error, not an empty ledger.
    address = f"{path.resolve().as_uri()}?mode=rw"
    try:
        with closing(
            sqlite3.connect(address, uri=True, timeout=LOCK_SECONDS, isolation_level=None)
        ) as connection:
            connection.row_factory = typed
            connection.execute("pragma synchronous = full")
            yield connection
    except sqlite3.DatabaseError as error:
        raise unusable(f"{path} can't be used as a ledger", error) from error


@contextmanager
def one_snapshot(connection: sqlite3.Connection) -> Iterator[None]:
    """All reads in it see the rows that there were at the first of them."""
    connection.execute("begin deferred")
    with connection:
        yield


def copied(path: Path, folder: Path) -> Path:
    """A copy of an SQLite file in a folder, with SQLite's side files. Raises LedgerError: it can't
    be read, or was written to during each of the attempts."""
    beside = path.with_name(f"{path.name}-wal")
    files = [each for each in (path, beside) if each.exists()]
    try:
        for _ in range(COPIES):
            before = [each.stat() for each in files]
            for each in files:
                shutil.copyfile(each, folder / each.name)
            after = [each.stat() for each in files]
            if [(at.st_mtime_ns, at.st_size) for at in before] == [
                (at.st_mtime_ns, at.st_size) for at in after
            ]:
                return folder / path.name
    except OSError as error:
        raise LedgerError(f"{path} can't be read: {error}") from error
    raise LedgerError(
        f"{path} is written to all the time: read it from a folder that is not read-only"
    )


def flush_to_disk(path: Path) -> None:
    """Flushes a file, or a folder's list of files, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
