"""What was spent, on disk: an append-only SQLite file whose rows are chained by digest.

The server keeps one for the user-level guarantee of a run; a client keeps one of its own for its example-level and
local guarantees, over every run it takes part in. A row is on disk before the release that it pays for is made, so a
crash may make the ledger say more than was released, never less.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from discreet.privacy.events import event_from_json, event_to_json
from discreet.privacy.ledger import PrivacyLedger

if TYPE_CHECKING:
    from dp_accounting import DpEvent

LOCK_SECONDS = 60.0  # how long a process waits for the others that use the same file
SCHEMA = """
create table if not exists facts (name text primary key, value text not null) without rowid;
create table if not exists releases (
    number integer primary key,
    round integer not null,
    guarantee text not null,
    holder text not null,
    event text not null,
    count integer not null,
    digest text not null
);
create index if not exists by_holder on releases (guarantee, holder);
"""


class LedgerError(ValueError):
    """A ledger file is missing, damaged, or belongs to another run."""


@dataclass(frozen=True)
class Charge:
    """One release to be paid for: `count` times `event` on the data of `holder`, in `round`."""

    round: int
    guarantee: str
    holder: str
    event: DpEvent
    count: int = 1


@dataclass(frozen=True)
class Release:
    """A row of the ledger."""

    number: int
    round: int
    guarantee: str
    holder: str
    event: str
    count: int
    digest: str


def _digest(previous: str, content: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps([previous, *content]).encode()).hexdigest()


class DurableLedger:
    """Appends charges to a SQLite file and adds up what was spent.

    The connection is opened for each use: a ledger object holds no lock and may be shared between threads and passed on
    to another process. WAL with full synchronisation: `charge` returns after the rows have reached the disk.

    Args:
      path: the file; made where it is missing.
      facts: the settings that decide the privacy of what is charged here. They are stored when the file is made.

    Raises:
      LedgerError: the file can't be used, or was made with other facts; the message names what differs.
    """

    def __init__(self, path: Path, *, facts: Mapping[str, object] | None = None) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LedgerError(f"{path} can't be used as a ledger: {error.strerror}") from error
        with self._connect() as connection:
            connection.executescript(SCHEMA)
            with _transaction(connection):
                known = dict(connection.execute("select name, value from facts"))
                if "head" not in known:
                    wanted = {name: json.dumps(value) for name, value in (facts or {}).items()}
                    head = _digest("", sorted(wanted.items()))
                    rows = [*wanted.items(), ("head", head), ("rows", "0")]
                    connection.executemany("insert into facts values (?, ?)", rows)
        if facts is not None:
            self._check_facts(facts)

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self.path, timeout=LOCK_SECONDS, isolation_level=None)) as connection:
                _switch_to_wal(connection)
                connection.execute("pragma synchronous = full")
                yield connection
        except sqlite3.DatabaseError as error:
            raise LedgerError(f"{self.path} can't be used as a ledger: {error}") from error

    def facts(self) -> dict[str, Any]:
        """The settings that the ledger was made with."""
        with self._connect() as connection:
            rows = dict(connection.execute("select name, value from facts"))
        return {name: json.loads(value) for name, value in rows.items() if name not in ("head", "rows")}

    def _check_facts(self, facts: Mapping[str, object]) -> None:
        stored, wanted = self.facts(), json.loads(json.dumps(dict(facts)))
        differing = [name for name in sorted({*stored, *wanted}) if stored.get(name) != wanted.get(name)]
        if differing:
            parts = [f"{name} was {stored.get(name)}, is {wanted.get(name)}" for name in differing]
            raise LedgerError(f"{self.path} belongs to a run with other privacy settings: {'; '.join(parts)}")

    def charge(self, charges: Sequence[Charge]) -> None:
        """Appends rows in one transaction; they are on disk when this returns. No charges: nothing is written."""
        if not charges:
            return
        with self._connect() as connection, _transaction(connection):
            _append(connection, charges)

    def charge_after(self, releases: int, charge: Charge) -> bool:
        """Appends one charge where its holder has been charged for exactly so many releases, and says whether it did.

        So a budget that was looked at before still holds: nobody else has charged in between.
        """
        query = "select coalesce(sum(count), 0) from releases where guarantee = ? and holder = ?"
        with self._connect() as connection, _transaction(connection):
            (known,) = connection.execute(query, (charge.guarantee, charge.holder)).fetchone()
            if known == releases:
                _append(connection, [charge])
            return bool(known == releases)

    def spent(self, guarantee: str, *, holder: str = "") -> PrivacyLedger:
        """Everything charged for a guarantee on the data of one holder, equal events merged."""
        query = (
            "select event, sum(count) from releases where guarantee = ? and holder = ? "
            "group by event order by min(number)"
        )
        with self._connect() as connection:
            rows = connection.execute(query, (guarantee, holder)).fetchall()
        return PrivacyLedger(tuple((event_from_json(text), int(count)) for text, count in rows))

    def holders(self, guarantee: str) -> list[str]:
        """Whose data a guarantee has been charged for."""
        with self._connect() as connection:
            query = "select distinct holder from releases where guarantee = ? order by holder"
            return [row[0] for row in connection.execute(query, (guarantee,))]

    def releases(self) -> list[Release]:
        """Every row, oldest first."""
        with self._connect() as connection:
            return [Release(*row) for row in connection.execute("select * from releases order by number")]

    def verify(self) -> list[str]:
        """What is wrong with the file: one sentence for each fault, none where the chain holds.

        The chain finds a changed, inserted, reordered or deleted row. It does not stop somebody who rewrites the whole
        file with a new chain: compare the head digest with a copy kept elsewhere for that.
        """
        with self._connect() as connection:
            known = dict(connection.execute("select name, value from facts"))
        head, count = known.pop("head", ""), known.pop("rows", "0")
        digest = _digest("", sorted(known.items()))
        rows = self.releases()
        for position, row in enumerate(rows, start=1):
            content = (row.number, row.round, row.guarantee, row.holder, row.event, row.count)
            digest = _digest(digest, content)
            if row.number != position:
                return [f"row {position} is missing: the next one is numbered {row.number}"]
            if row.digest != digest:
                return [f"row {position} does not fit the chain: it, a row before it, or the settings were changed"]
        if len(rows) != int(count) or digest != head:
            return [f"the last rows are missing: {len(rows)} of {count} are there, and the head digest differs"]
        return []

    def head(self) -> str:
        """The digest of the last row: a copy kept elsewhere proves later that nothing before it was rewritten."""
        with self._connect() as connection:
            row = connection.execute("select value from facts where name = 'head'").fetchone()
        return str(row[0])


def _append(connection: sqlite3.Connection, charges: Sequence[Charge]) -> None:
    known = dict(connection.execute("select name, value from facts where name in ('head', 'rows')"))
    head, number = known["head"], int(known["rows"])
    rows = []
    for charge in charges:
        number += 1
        text = event_to_json(charge.event)
        content = (number, charge.round, charge.guarantee, charge.holder, text, charge.count)
        head = _digest(head, content)
        rows.append((*content, head))
    connection.executemany("insert into releases values (?, ?, ?, ?, ?, ?, ?)", rows)
    connection.execute("update facts set value = ? where name = 'head'", (head,))
    connection.execute("update facts set value = ? where name = 'rows'", (str(number),))


def _switch_to_wal(connection: sqlite3.Connection) -> None:
    # The switch of a new file needs it alone for a moment. SQLite waits its timeout for every other lock, not for this.
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            connection.execute("pragma journal_mode = wal")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.002)


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    # "immediate": two processes that append take turns, and each chains to the row that is really the last.
    connection.execute("begin immediate")
    with connection:
        yield
