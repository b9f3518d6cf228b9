"""Keeps what a SuperLink holds small, however many nodes there are.

What a call brought stays in memory when it is answered: Starlette's middlewares leave reference cycles behind, and
Python looks for these by the number of objects, whatever their size. And each of up to fifteen connections to the
database keeps 64 MB of it, and maps 256 MB.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass

from flwr.supercore import sql_mixin
from flwr.supercore.constant import SQLITE_PRAGMAS
from flwr.supercore.object_store.sql_object_store import SqlObjectStore

from discreet.deployment.flower_fixes.applies import applies

EVERY = 2**25  # bytes of contents: a search for garbage takes some 20 ms
CONTENTS_EXPECTED, DATABASE_EXPECTED = "bbd75af3eaf6", "97978fd01552"
SMALL = {"cache_size": "-2000", "mmap_size": "0"}  # KiB of a connection, SQLite's default; bytes of the file

put_content, get_content = SqlObjectStore.put, SqlObjectStore.get


@dataclass
class Contents:
    """What was stored and read since garbage was collected last, in bytes."""

    size: int = 0

    def came(self, size: int) -> None:
        """So many bytes more: when they are enough, what calls have left behind goes."""
        self.size += size
        if self.size >= EVERY:
            self.size = 0
            gc.collect()


contents = Contents()


def put(store: SqlObjectStore, object_id: str, object_content: bytes) -> None:
    """Flower's function of this name."""
    contents.came(len(object_content))
    put_content(store, object_id, object_content)


def get(store: SqlObjectStore, object_id: str) -> bytes | None:
    """Flower's function of this name."""
    content = get_content(store, object_id)
    contents.came(len(content or b""))
    return content


def be_small() -> None:
    """Makes the SuperLink that this process becomes so."""
    if applies("content_garbage", put_content, get_content, expected=CONTENTS_EXPECTED):
        SqlObjectStore.put, SqlObjectStore.get = put, get  # type: ignore[method-assign, assignment]
    if applies("database_memory", sql_mixin._set_sqlite_pragmas, SQLITE_PRAGMAS, expected=DATABASE_EXPECTED):
        pragmas = dict(sql_mixin.SQLITE_PRAGMAS) | SMALL  # type: ignore[attr-defined]
        sql_mixin.SQLITE_PRAGMAS = tuple(pragmas.items())  # type: ignore[attr-defined, assignment]
