"""The ledger on disk: an append-only SQLite file whose rows are chained by digest.

The server keeps one for the user-level guarantee of a run; a client keeps one of its own for its
example-level and local guarantees, over every run it takes part in. A row is on disk before the
release that it pays for is made, so a crash may make the ledger say more than was released, never
less.

A ledger is made by an explicit act. One that is missing, damaged or older than it was is an error,
never a new one."""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from discreet.accounting.events import event_from_json, event_to_json
from discreet.accounting.privacy_ledger import PrivacyLedger
from discreet.ledger import event_sums
from discreet.ledger.chain import (
    faults,
    head_at,
    lacking,
    last_faults,
    position_of,
    row_digest,
    settings_of,
)
from discreet.ledger.charges import Charge, LedgerError, LedgerPosition
from discreet.ledger.rollback_guard import (
    RollbackGuard,
    connected,
    copied,
    flush_to_disk,
    make_database,
    one_snapshot,
    remove_database,
)

__all__ = ["CLIENTS_LEDGER", "Charge", "DurableLedger", "LedgerError", "LedgerPosition", "Release"]

ANOTHER = (
    "not the ledger that this machine charged there before. If it is the right one and was moved "
    "there, accept it by `discreet ledger adopt {}`"
)
CLIENTS_LEDGER = "clients.db"  # in a simulation's run folder: the spending of virtual clients
SCHEMA = """
create table facts (name text primary key, value text not null) without rowid;
create table releases (
    number integer primary key,
    round integer not null,
    guarantee text not null,
    holder text not null,
    event text not null,
    count integer not null,
    nonce text not null,
    digest text not null
);
create index by_holder on releases (guarantee, holder);
"""


@dataclass(frozen=True)
class Release:
    """A row of the ledger. `nonce` begins at random, so that the same charge to two copies of a
    ledger gives two different digests, and ends with the digest of the ledger's `event_sums`."""

    number: int
    round: int
    guarantee: str
    data_owner: str
    event: str
    count: int
    nonce: str
    digest: str


def by_data_owner(releases: Iterable[Release]) -> dict[str, PrivacyLedger]:
    """The releases on each data owner's data; equal ones give equal ledgers, in whichever order
    they were charged."""
    return _by_data_owner((each.data_owner, each.event, each.count) for each in releases)


def _by_data_owner(charged: Iterable[tuple[str, str, int]]) -> dict[str, PrivacyLedger]:
    events: dict[str, Counter[str]] = defaultdict(Counter)
    for data_owner, event, count in charged:
        events[data_owner][event] += count
    return {
        name: PrivacyLedger(tuple((event_from_json(text), counts[text]) for text in sorted(counts)))
        for name, counts in events.items()
    }


class DurableLedger:
    """Appends charges to a SQLite file and adds up what was spent.

    A connection is opened for each use, so a ledger object holds no lock and may be shared between
    threads and passed on to another process. It uses WAL with full synchronisation: `charge`
    returns after the rows have reached the disk.

    Every charge is checked against this machine's record of the ledger (`rollback_guard`), so that
    neither an older copy nor a second one is charged, and goes to the ledger that was read first,
    whatever lies at its path now. If the ledger has an `account`, a
    `discreet.server.population_account`, that is charged first: a crash between the two leaves an
    account that says more than the ledger.

    Args:
      path: the file.
      facts: the settings that decide the privacy of the charged releases. The ledger must have been
        made with the same.

    Raises:
      LedgerError: the file is missing, can't be used, or was made with other facts; the message
        names the differences.
    """

    def __init__(self, path: Path, *, facts: Mapping[str, object] | None = None) -> None:
        self.path = path
        self.account: Any = None
        if not path.is_file():
            whole = path.absolute()  # the folder of a Flower process is not always the reader's
            raise LedgerError(
                f"{whole} is missing: put the ledger back, because what was spent still counts. A "
                f"node's first ledger is made by `discreet ledger create {whole}`"
            )
        was = self._settings()
        self.identity = was.pop("identity")
        if facts is None:
            return
        wanted = json.loads(json.dumps(dict(facts)))
        differing = [name for name in sorted({*was, *wanted}) if was.get(name) != wanted.get(name)]
        if differing:
            parts = [f"{name} was {was.get(name)}, is {wanted.get(name)}" for name in differing]
            raise LedgerError(
                f"{self.path} belongs to a run with other privacy settings than config.yaml or "
                f"the command says: {'; '.join(parts)}"
            )

    @classmethod
    def create(cls, path: Path, *, facts: Mapping[str, object] | None = None) -> Self:
        """Makes a new, empty ledger with an identity of its own.

        Raises:
          LedgerError: the file exists already, or can't be made.
        """
        identity = secrets.token_hex(16)
        settings = {
            name: json.dumps(value)
            for name, value in {**(facts or {}), "identity": identity}.items()
        }
        position = LedgerPosition(identity, 0, row_digest("", sorted(settings.items())))
        rows = [*settings.items(), ("head", position.head), ("rows", "0")]
        with ExitStack() as undone:
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                if not make_database(
                    path, SCHEMA, [("insert into facts values (?, ?)", row) for row in rows]
                ):
                    raise LedgerError(f"{path} exists already, and is not overwritten")
                # A ledger that can't be used, or that the guard does not know, is removed again.
                undone.callback(remove_database, path)
                flush_to_disk(path.parent)
            except (OSError, sqlite3.DatabaseError) as error:
                raise LedgerError(f"{path} can't be made: {error}") from error
            made = cls(path)
            with RollbackGuard.opened() as guard:
                guard.enter(position, path)
            undone.pop_all()
        return made

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection that writes nothing, and sees no charge that others make meanwhile. As
        SQLite writes beside a file that it reads, a copy is read on a read-only disk."""
        with ExitStack() as stack:
            path = self.path
            if not os.access(path.resolve().parent, os.W_OK):
                path = copied(path, Path(stack.enter_context(tempfile.TemporaryDirectory())))
            connection = stack.enter_context(connected(path))
            stack.enter_context(one_snapshot(connection))
            yield connection

    def charge(
        self,
        charges: Sequence[Charge],
        *,
        since: LedgerPosition | None = None,
        allowed: Callable[[PrivacyLedger], None] | None = None,
    ) -> LedgerPosition | None:
        """Appends rows in one transaction; they are on disk when this returns. Without charges
        nothing is written.

        Args:
          since: nothing is written if one of the data owners was charged since this position.
          allowed: nothing is written if it raises. It is called with the result of `total`, to
            which nothing is added until the charges are written.

        Returns:
          The ledger's position after these charges; None if nothing was written.
        """
        if not charges:
            return None
        if self.account is not None:
            self.account.charge(charges)
        with RollbackGuard.opened() as guard, connected(self.path) as connection:
            # "immediate": processes that append take turns, so that each chains to the actual last
            # row.
            connection.execute("begin immediate")
            with connection:
                before = position_of(connection)
                if before.identity != self.identity:
                    raise self._another()
                if since is not None and not _holds(connection, since):
                    raise self._another()
                if since is not None and _charged_since(connection, since) & {
                    charge.data_owner for charge in charges
                }:
                    return None
                if allowed is not None:
                    allowed(_total(connection))
                known = self._known(connection, guard, before)
                position = _append(connection, charges, before)
            # If another process was faster, it has charged either this file or a copy of it.
            while known.rows < position.rows and not guard.note(position, self.path, since=known):
                known = self._known(connection, guard, position_of(connection))
        return position

    def total(self) -> PrivacyLedger:
        """The spending of all data owners together. The event that was charged last comes last, so
        that epsilon is updated from the unchanged part and that event."""
        with self.reading() as connection:
            return _total(connection)

    def whole(self) -> Self:
        """This ledger, checked for reading. Raises LedgerError: it is damaged, or lacks rows that
        this machine has charged to it."""
        if damage := self.verify():
            raise LedgerError(f"{self.path} is damaged: {damage[0]}")
        if older := self.lacking():
            raise LedgerError(f"{self.path} is {older[0]}")
        return self

    def _known(
        self, connection: sqlite3.Connection, guard: RollbackGuard, position: LedgerPosition
    ) -> LedgerPosition:
        """The last position that this machine knows of the ledger, which says that it is at
        `position`. Raises LedgerError: there is none, or the ledger lacks rows up to either."""
        known = guard.recall(position.identity)
        if known is None:
            raise LedgerError(
                f"{self.path} was never charged on this machine: it may be a copy. If no other "
                f"copy will be charged, accept it by `discreet ledger adopt {self.path}`"
            )
        if head_at(connection, position.rows) != position.head:
            raise LedgerError(f"{self.path} is damaged: its last rows are missing")
        if known != position:
            for fault in lacking(connection, known):
                raise LedgerError(f"{self.path} is {fault}")
        return known

    def check(self, *, all_rows: bool = True) -> None:
        """Checks that the ledger may be charged further.

        Args:
          all_rows: False, for a check before each message, takes the same time after a million
            rows: it reads the sums, and the rows from this machine's last charge on.

        Raises:
          LedgerError: its chain is broken, its sums are not those of its rows, this machine never
            charged it, or it lacks rows that this machine has charged.
        """
        with RollbackGuard.opened() as guard, connected(self.path) as connection:
            with one_snapshot(connection):
                if all_rows or not event_sums.are_kept(connection):
                    found = faults(connection)
                else:
                    found = last_faults(connection, guard)
            for fault in found:
                raise LedgerError(f"{self.path} is damaged: {fault}")
            # Outside of the snapshot: the guard may know rows that were charged since.
            known = self._known(connection, guard, position_of(connection))
            if guard.another_at(self.path, known.identity):
                raise LedgerError(f"{self.path} is {ANOTHER.format(self.path)}")

    def adopt(self) -> None:
        """Lets this machine continue a ledger that it never charged, or knows at another path.

        Raises:
          LedgerError: its chain is broken, or it lacks rows that this machine has charged.
        """
        position = self.position()
        with RollbackGuard.opened() as guard:
            known = guard.recall(position.identity)
            if known is None or self.contains(known):
                guard.enter(position, self.path)
        self.check()

    def contains(self, position: LedgerPosition) -> bool:
        """True if the position is one of this ledger, and the ledger holds all rows up to it."""
        with self.reading() as connection:
            return _holds(connection, position)

    def check_contains(self, position: LedgerPosition) -> None:
        """Raises LedgerError unless the ledger contains a position that was read before."""
        if not self.contains(position):
            raise self._another()

    def _another(self) -> LedgerError:
        return LedgerError(
            f"{self.path} is not the ledger that was read before, or an older copy: put that file "
            "back"
        )

    def facts(self) -> dict[str, Any]:
        """The settings with which the ledger was made."""
        return {name: value for name, value in self._settings().items() if name != "identity"}

    def _settings(self) -> dict[str, Any]:
        with self.reading() as connection:
            stored = settings_of(connection)
        try:
            return {name: json.loads(value) for name, value in stored.items()}
        except (ValueError, RecursionError) as error:
            raise LedgerError(f"{self.path} is damaged: a setting can't be read") from error

    def position(self) -> LedgerPosition:
        """The ledger's position. A copy of its head digest, kept elsewhere, can prove later that
        nothing was rewritten."""
        with self.reading() as connection:
            return position_of(connection)

    def spent(self, guarantee: str, *, data_owner: str = "") -> PrivacyLedger:
        """Everything charged for a guarantee on the data of one data owner, equal events merged."""
        with self.reading() as connection:
            query = (
                f"select event, count from {event_sums.source(connection)} "
                "where guarantee = ? and holder = ? order by first"
            )
            rows = connection.execute(query, (guarantee, data_owner)).fetchall()
        try:
            return PrivacyLedger(tuple((event_from_json(text), count) for text, count in rows))
        except (KeyError, TypeError, ValueError) as error:
            raise LedgerError(
                f"{self.path} is damaged: an event can't be read ({error})"
            ) from error

    def spent_by_each(self, guarantee: str) -> dict[str, PrivacyLedger]:
        """Everything charged for a guarantee, by data owner. Equal spending gives equal ledgers, in
        whichever order it was charged."""
        with self.reading() as connection:
            query = (
                f"select holder, event, count from {event_sums.source(connection)} "
                "where guarantee = ?"
            )
            return _by_data_owner(connection.execute(query, (guarantee,)))

    def guarantees(self) -> set[str]:
        """The guarantees that have a charge."""
        with self.reading() as connection:
            query = f"select distinct guarantee from {event_sums.source(connection)}"
            return {name for (name,) in connection.execute(query)}

    def last_round(self, guarantee: str) -> int:
        """The largest round that was charged for a guarantee; 0 without one."""
        with self.reading() as connection:
            query = "select coalesce(max(round), 0) as last from releases where guarantee = ?"
            ((last,),) = connection.execute(query, (guarantee,))
            return int(last)

    def data_owners(self, guarantee: str) -> list[str]:
        """The data owners that have a charge for a guarantee."""
        with self.reading() as connection:
            query = (
                f"select distinct holder from {event_sums.source(connection)} "
                "where guarantee = ? order by holder"
            )
            return [row[0] for row in connection.execute(query, (guarantee,))]

    def releases(self) -> list[Release]:
        """Every row, oldest first."""
        with self.reading() as connection:
            return [
                Release(*row)
                for row in connection.execute("select * from releases order by number")
            ]

    def verify(self) -> list[str]:
        """The faults of the file, one sentence each; empty if the chain holds.

        The chain reveals a changed, inserted, reordered or deleted row, but not a whole file that
        was rewritten with a new chain. To detect that, compare the head digest with a copy kept
        elsewhere.
        """
        with self.reading() as connection:
            return faults(connection)

    def lacking(self) -> list[str]:
        """The fault of a ledger that lacks rows which this machine has charged, or at whose path it
        charged another ledger; else empty. Of a ledger that it never charged this can't be
        known."""
        # The guard is read before the rows: they only grow.
        known, is_another = RollbackGuard.known_here(self.position().identity, self.path)
        if is_another:
            return [ANOTHER.format(self.path)]
        if known is None:
            return []
        with self.reading() as connection:
            return lacking(connection, known)


def position_in(path: Path) -> LedgerPosition:
    """The current position of the ledger in a file that this process may write to."""
    with connected(path) as connection:
        return position_of(connection)


def _holds(connection: sqlite3.Connection, position: LedgerPosition) -> bool:
    is_same = position_of(connection).identity == position.identity
    return is_same and head_at(connection, position.rows) == position.head


def _charged_since(connection: sqlite3.Connection, position: LedgerPosition) -> set[str]:
    query = "select distinct holder from releases where number > ?"
    return {str(data_owner) for (data_owner,) in connection.execute(query, (position.rows,))}


def _total(connection: sqlite3.Connection) -> PrivacyLedger:
    for fault in event_sums.damage(connection):
        raise sqlite3.DatabaseError(fault)
    query = (
        f"select event, sum(count) from {event_sums.source(connection)} "
        "group by event order by max(last)"
    )
    return PrivacyLedger(
        tuple((event_from_json(text), count) for text, count in connection.execute(query))
    )


def _append(
    connection: sqlite3.Connection, charges: Sequence[Charge], before: LedgerPosition
) -> LedgerPosition:
    texts = [event_to_json(charge.event) for charge in charges]
    sums = event_sums.added(
        connection,
        (
            (charge.guarantee, charge.data_owner, text, charge.count)
            for charge, text in zip(charges, texts, strict=True)
        ),
        after=before.rows,
    )
    nonce = secrets.token_hex(8) + sums
    head = before.head
    number = before.rows
    rows = []
    for charge, text in zip(charges, texts, strict=True):
        number += 1
        content = (
            number,
            charge.round,
            charge.guarantee,
            charge.data_owner,
            text,
            charge.count,
            nonce,
        )
        head = row_digest(head, content)
        rows.append((*content, head))
    connection.executemany("insert into releases values (?, ?, ?, ?, ?, ?, ?, ?)", rows)
    changed = [(head, "head"), (str(number), "rows")]
    connection.executemany("update facts set value = ? where name = ?", changed)
    return LedgerPosition(before.identity, number, head)
