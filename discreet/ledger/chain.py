"""The chain of a ledger's rows: each row has a digest of itself and of the row before."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

from discreet.ledger import event_sums
from discreet.ledger.charges import LedgerPosition
from discreet.ledger.rollback_guard import RollbackGuard


def row_digest(previous: str, content: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps([previous, *content]).encode()).hexdigest()


def position_of(connection: sqlite3.Connection) -> LedgerPosition:
    """The current position of the ledger."""
    query = "select name, value from facts where name in ('identity', 'rows', 'head')"
    facts = dict(connection.execute(query))
    try:
        return LedgerPosition(json.loads(facts["identity"]), int(facts["rows"]), facts["head"])
    except (KeyError, ValueError) as error:
        raise sqlite3.DatabaseError("it has no identity") from error


def settings_of(connection: sqlite3.Connection) -> dict[str, str]:
    """The facts with which the ledger was made, as JSON, its identity among them."""
    query = "select name, value from facts where name not in ('rows', 'head')"
    facts = dict(connection.execute(query))
    if "identity" not in facts:
        raise sqlite3.DatabaseError("it has no identity")
    return facts


def head_at(connection: sqlite3.Connection, rows: int) -> str | None:
    """The digest of row number `rows`; for 0 that of the settings."""
    if rows == 0:
        return row_digest("", sorted(settings_of(connection).items()))
    row = connection.execute("select digest from releases where number = ?", (rows,)).fetchone()
    if row is None:
        return None
    return str(row[0])


def lacking(connection: sqlite3.Connection, known: LedgerPosition) -> list[str]:
    """The fault of a ledger that lacks rows which this machine has charged; else empty."""
    if head_at(connection, known.rows) == known.head:
        return []
    rows = position_of(connection).rows
    return [
        f"an older copy, or another copy of it was charged: this machine knows {known.rows} rows "
        f"of it, which are not all among the {rows} in the file. Put back the one that has them"
    ]


def faults(connection: sqlite3.Connection) -> list[str]:
    """The fault of a ledger, by all of its rows; else empty."""
    # Without this check, a file that was cut short would look like one with fewer rows: SQLite adds
    # up by its index.
    ((fault,),) = connection.execute("pragma integrity_check(1)")
    if fault != "ok":
        return [" ".join(fault.split())]
    rows = connection.execute("select * from releases order by number")
    return _chain_faults(connection, rows, after=0) or event_sums.forged(connection)


def last_faults(connection: sqlite3.Connection, guard: RollbackGuard) -> list[str]:
    """The fault of a ledger, by its sums and its rows from this machine's last charge on; else
    empty."""
    position = position_of(connection)
    known = guard.recall(position.identity)
    after = 0
    if known is not None:
        after = max(0, min(known.rows, position.rows) - 1)
    rows = connection.execute("select * from releases where number > ? order by number", (after,))
    return _chain_faults(connection, rows, after=after) or event_sums.damage(connection)


def _chain_faults(
    connection: sqlite3.Connection, rows: Iterable[tuple[Any, ...]], *, after: int
) -> list[str]:
    """The fault of the rows that follow row number `after`, up to the last one; else empty."""
    position = position_of(connection)
    digest = head_at(connection, after)
    number = after
    for *content, found in rows:
        number += 1
        digest = row_digest(str(digest), content)
        if content[0] != number:
            return [f"row {number} is missing: the next one is numbered {content[0]}"]
        if found != digest:
            return [
                f"row {number} does not fit the chain: it, a row before it, or the settings were "
                "changed"
            ]
    if number != position.rows or digest != position.head:
        return [
            f"the last rows are missing: {number} of {position.rows} are there, and the head "
            "digest differs"
        ]
    return []
