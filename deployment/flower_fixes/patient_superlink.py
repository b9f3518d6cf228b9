"""`flower-superlink` with more patience for its database, and the same words.

Flower 1.41 lets a writer wait 5 s for the others. With 20 nodes that reply at once on two cores that was too short: the
call failed with "database is locked", and the process that starts ServerApps ended for good.
"""

from __future__ import annotations

from flwr.supercore import sql_mixin
from flwr.supercore.constant import SQLITE_PRAGMAS

WAIT_SECONDS = 120


def be_patient() -> None:
    """Makes connections that this process opens from now on wait; in Flower it is a constant."""
    pragmas = {**dict(SQLITE_PRAGMAS), "busy_timeout": str(1000 * WAIT_SECONDS)}
    sql_mixin.SQLITE_PRAGMAS = tuple(pragmas.items())  # type: ignore[attr-defined, assignment]


if __name__ == "__main__":
    from flwr.superlink.cli import flower_superlink

    be_patient()
    flower_superlink()
