"""Keeps a SuperLink's memory small, however many nodes there are.

The content of a call stays in memory when it is answered: Starlette's middlewares leave reference cycles behind, and
Python looks for these by the number of objects, whatever their size.
"""

from __future__ import annotations

import gc

from flwr.supercore.object_store.sql_object_store import SqlObjectStore

from discreet.deployment.flower_fixes.commands import applies

EVERY = 2**25  # bytes of contents: a search for garbage takes some 20 ms
EXPECTED = "bbd75af3eaf6"

put_content, get_content = SqlObjectStore.put, SqlObjectStore.get


since_collection = [0]  # bytes of contents stored and read


def _came(size: int) -> None:
    since_collection[0] += size
    if since_collection[0] >= EVERY:
        since_collection[0] = 0
        gc.collect()


def put(store: SqlObjectStore, object_id: str, object_content: bytes) -> None:
    """Flower's function of this name."""
    _came(len(object_content))
    put_content(store, object_id, object_content)


def get(store: SqlObjectStore, object_id: str) -> bytes | None:
    """Flower's function of this name."""
    content = get_content(store, object_id)
    _came(len(content or b""))
    return content


def be_small() -> None:
    """Makes the SuperLink that this process becomes so."""
    if applies("content_garbage", put_content, get_content, expected=EXPECTED):
        SqlObjectStore.put, SqlObjectStore.get = put, get  # type: ignore[method-assign, assignment]
