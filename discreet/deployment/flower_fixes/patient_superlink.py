"""Gives a SuperLink more patience for its database, and connections to it that keep little.

Flower lets a writer wait 5 s for the others. With 20 nodes that reply at once on two cores that was too short: the call
failed with "database is locked", and the process that starts ServerApps ended for good.
"""

from __future__ import annotations

from flwr.supercore import sql_mixin

from discreet.deployment.flower_fixes.commands import applies

WAIT_SECONDS = 120
PRAGMAS = {
    "database_patience": {"busy_timeout": str(1000 * WAIT_SECONDS)},
    # Each of up to fifteen connections would keep 64 MB, and map 256 MB. KiB, SQLite's default; bytes.
    "database_memory": {"cache_size": "-2000", "mmap_size": "0"},
}
REPLACED = (sql_mixin._set_sqlite_pragmas, sql_mixin.SQLITE_PRAGMAS)  # type: ignore[attr-defined]
EXPECTED = "97978fd01552"


def be_patient() -> None:
    """Makes connections that this process opens from now on wait, and keep little; in Flower it is a constant."""
    pragmas = dict(sql_mixin.SQLITE_PRAGMAS)  # type: ignore[attr-defined]
    for name, ours in PRAGMAS.items():
        if applies(name, *REPLACED, expected=EXPECTED):
            pragmas |= ours
    sql_mixin.SQLITE_PRAGMAS = tuple(pragmas.items())  # type: ignore[attr-defined, assignment]
