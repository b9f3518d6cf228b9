"""Keeps a SuperLink's memory small, however many nodes there are, and has it wait longer for its database.

Flower lets a writer wait 5 s for the others. With 20 nodes that reply at once on two cores that was too short: the call
failed with "database is locked", and the process that starts ServerApps ended for good. The content of a call stays in
memory when it is answered: Starlette's middlewares leave reference cycles behind, and Python looks for these by the
number of objects, whatever their size.
"""

from __future__ import annotations

import gc

from flwr.supercore import sql_mixin
from flwr.supercore.object_store.sql_object_store import SqlObjectStore

from discreet.deployment.flower_fixes import Fixes

# Milliseconds. Each of up to fifteen connections would keep 64 MB, and map 256 MB: KiB, SQLite's default; bytes.
PRAGMAS = {"busy_timeout": "120000", "cache_size": "-2000", "mmap_size": "0"}
EVERY = 2**25  # bytes of contents: a search for garbage takes some 20 ms

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


SMALL = tuple({**dict(sql_mixin.SQLITE_PRAGMAS), **PRAGMAS}.items())  # type: ignore[attr-defined]
FIXES: Fixes = {
    "database": ((sql_mixin, "SQLITE_PRAGMAS", SMALL),),
    "content_garbage": ((SqlObjectStore, "put", put), (SqlObjectStore, "get", get)),
}
