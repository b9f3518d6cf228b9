"""Keeps what a SuperLink holds small, however many nodes there are.

What a call brought stays in memory when it is answered: Starlette's middlewares leave reference cycles behind, and
Python looks for these by the number of objects, whatever their size. And each of up to fifteen connections to the
database keeps 64 MB of it, and maps 256 MB.
"""

from __future__ import annotations

import gc

from flwr.supercore import sql_mixin
from flwr.supercore.constant import SQLITE_PRAGMAS
from flwr.supercore.object_store.sql_object_store import SqlObjectStore

from discreet.deployment.flower_fixes.applies import applies

LARGE = 2**18  # bytes of a content
CONTENTS_EXPECTED, DATABASE_EXPECTED = "bbd75af3eaf6", "97978fd01552"
SMALL = {"cache_size": "-2000", "mmap_size": "0"}  # KiB of a connection, SQLite's default; bytes of the file

put_content, get_content = SqlObjectStore.put, SqlObjectStore.get


def put(store: SqlObjectStore, object_id: str, object_content: bytes) -> None:
    """Flower's function of this name, after what earlier calls have left behind."""
    _make_room_for(object_content)
    put_content(store, object_id, object_content)


def get(store: SqlObjectStore, object_id: str) -> bytes | None:
    """Flower's function of this name, and an end of what earlier calls have left behind."""
    content = get_content(store, object_id)
    _make_room_for(content)
    return content


def _make_room_for(content: bytes | None) -> None:
    if content is not None and len(content) >= LARGE:
        gc.collect()


def be_small() -> None:
    """Makes the SuperLink that this process becomes so."""
    if applies("content_garbage", put_content, get_content, expected=CONTENTS_EXPECTED):
        SqlObjectStore.put, SqlObjectStore.get = put, get  # type: ignore[method-assign, assignment]
    if applies("database_memory", sql_mixin._set_sqlite_pragmas, SQLITE_PRAGMAS, expected=DATABASE_EXPECTED):
        pragmas = dict(sql_mixin.SQLITE_PRAGMAS) | SMALL  # type: ignore[attr-defined]
        sql_mixin.SQLITE_PRAGMAS = tuple(pragmas.items())  # type: ignore[attr-defined, assignment]
