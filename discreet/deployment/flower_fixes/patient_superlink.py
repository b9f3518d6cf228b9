"""`flower-superlink` with more patience for its database, which it keeps small, and less in memory.

Flower lets a writer wait 5 s for the others. With 20 nodes that reply at once on two cores that was too short: the call
failed with "database is locked", and the process that starts ServerApps ended for good.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

from flwr.supercore import sql_mixin
from flwr.supercore.constant import SQLITE_PRAGMAS

from discreet.deployment.flower_fixes.applies import applies
from discreet.deployment.flower_fixes.object_pauses import look_for_objects_soon
from discreet.deployment.flower_fixes.small_superlink import be_small
from discreet.deployment.flower_fixes.unread_messages import forget_unread_messages

WAIT_SECONDS = 120
PRAGMAS = {
    "database_patience": {"busy_timeout": str(1000 * WAIT_SECONDS)},
    # Each of up to fifteen connections would keep 64 MB, and map 256 MB. KiB, SQLite's default; bytes.
    "database_memory": {"cache_size": "-2000", "mmap_size": "0"},
}
EXPECTED = "97978fd01552"


def be_patient() -> None:
    """Makes connections that this process opens from now on wait, and keep little; in Flower it is a constant."""
    pragmas = dict(sql_mixin.SQLITE_PRAGMAS)  # type: ignore[attr-defined]
    for name, ours in PRAGMAS.items():
        if applies(name, sql_mixin._set_sqlite_pragmas, SQLITE_PRAGMAS, expected=EXPECTED):
            pragmas |= ours
    sql_mixin.SQLITE_PRAGMAS = tuple(pragmas.items())  # type: ignore[attr-defined, assignment]


def start_server_apps_patiently() -> None:
    """Has the SuperLink find this folder's `flwr-serverapp` first, if what that replaces is there to be replaced."""
    if look_for_objects_soon():
        first = [str(Path(__file__).parent), str(Path(sys.executable).parent)]
        os.environ["PATH"] = os.pathsep.join([*first, os.environ.get("PATH", os.defpath)])


if __name__ == "__main__":
    from flwr.superlink.cli import flower_superlink

    be_patient()
    be_small()
    forget_unread_messages()
    start_server_apps_patiently()
    gc.freeze()  # what was imported stays: a search for garbage need not look through it
    flower_superlink()
