"""The sums of a ledger: the number of times that each event was charged, by guarantee and data
owner.

They are kept beside the rows and changed in the transaction of a charge, so that a charge takes as
long after a million rows as after one. The nonce of the charged rows ends with the digest of all
sums after it. So the chain of rows, and this machine's record of the chain, hold the sums too.

A ledger that an older version charged last has no such digest. Its rows are added up at each use,
until the next charge.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Sequence
from itertools import zip_longest

MARK = ":"  # between the random part of a nonce and the digest
MODULUS = 1 << 256
ROWS_ADDED_UP = (
    "select guarantee, holder, event, sum(count) as count, min(number) as first, "
    "max(number) as last from releases group by guarantee, holder, event"
)
TABLE = (
    "create table if not exists sums (guarantee text not null, holder text not null, "
    "event text not null, count integer not null, first integer not null, last integer not null, "
    "primary key (guarantee, holder, event)) without rowid"
)
IN_ORDER = "order by guarantee, holder, event"
FORGED = "the sums of its events are not those of its rows"


def are_kept(connection: sqlite3.Connection) -> bool:
    """True if the sums are those after the last charge; False if they are to be added up."""
    return _noted(connection) is not None


def source(connection: sqlite3.Connection) -> str:
    """The table that has the sums, or the query that adds up the rows."""
    if are_kept(connection):
        return "sums"
    return f"({ROWS_ADDED_UP})"


def added(
    connection: sqlite3.Connection, charges: Iterable[tuple[str, str, str, int]], *, after: int
) -> str:
    """Adds charges (guarantee, holder, event, count) to the sums; they are the rows that follow row
    number `after`. Returns the end of their nonce."""
    digest = _noted(connection)
    if digest is None:
        connection.execute(TABLE)
        connection.execute("delete from sums")
        connection.execute(f"insert into sums {ROWS_ADDED_UP}")
        digest = _digest(connection)
    for number, (*key, count) in enumerate(charges, start=after + 1):
        query = "select * from sums where guarantee = ? and holder = ? and event = ?"
        before = connection.execute(query, key).fetchone()
        now = (*key, count, number, number)
        if before is not None:
            now = (*key, before[3] + count, before[4], number)
            digest -= _digest_of(before)
        digest += _digest_of(now)
        connection.execute("insert or replace into sums values (?, ?, ?, ?, ?, ?)", now)
    return f"{MARK}{digest % MODULUS:064x}"


def damage(connection: sqlite3.Connection) -> list[str]:
    """The fault of sums that are not those after the last charge; else empty. The time it takes
    grows with the number of sums, not of rows."""
    noted = _noted(connection)
    if noted is None or _digest(connection) == noted:
        return []
    return [FORGED]


def forged(connection: sqlite3.Connection) -> list[str]:
    """The fault of sums that differ from those of the rows; else empty."""
    if not are_kept(connection):
        return []
    rows = connection.execute(f"{ROWS_ADDED_UP} {IN_ORDER}")
    sums = connection.execute(f"select * from sums {IN_ORDER}")
    if any(one != other for one, other in zip_longest(rows, sums)):
        return [FORGED]
    return damage(connection)


def _noted(connection: sqlite3.Connection) -> int | None:
    """The digest of the sums after the last charge; None if it was not noted."""
    last = connection.execute("select nonce from releases order by number desc limit 1").fetchone()
    if last is None or MARK not in last[0]:
        return None
    try:
        return int(last[0].partition(MARK)[2], 16)
    except ValueError as error:
        raise sqlite3.DatabaseError("it is damaged, a nonce can't be read") from error


def _digest(connection: sqlite3.Connection) -> int:
    """The digest of all sums, in no order: the sum of the digests of each."""
    return sum(map(_digest_of, connection.execute("select * from sums"))) % MODULUS


def _digest_of(one: Sequence[object]) -> int:
    return int.from_bytes(hashlib.sha256(json.dumps(one).encode()).digest())
