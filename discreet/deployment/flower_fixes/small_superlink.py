"""Keeps what a SuperLink holds small, however many nodes there are.

What a call brought stays in memory when it is answered: Starlette's middlewares leave reference cycles behind, and
Python looks for these by the number of objects, whatever their size.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass

from flwr.supercore.object_store.sql_object_store import SqlObjectStore

from discreet.deployment.flower_fixes.commands import applies

EVERY = 2**25  # bytes of contents: a search for garbage takes some 20 ms
EXPECTED = "bbd75af3eaf6"

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
    if applies("content_garbage", put_content, get_content, expected=EXPECTED):
        SqlObjectStore.put, SqlObjectStore.get = put, get  # type: ignore[method-assign, assignment]
