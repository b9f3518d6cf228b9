"""Checks if the guard of a site runs: the healthcheck of docker-compose.guard.yml. It needs nothing
but Python.

    python -S running.py GUARD_TOML

Exit code 0 if a guard has tested its sandbox and is running, 1 if not.
"""

from __future__ import annotations

import fcntl
import sys
import tomllib
from pathlib import Path

ACTIVE = "active"  # in the locked file of a guard that has started


def is_running(guard_toml: Path) -> bool:
    """True if a process holds the lock of the site, and has noted that it has started."""
    folder = guard_toml.parent / tomllib.loads(guard_toml.read_text())["blocks"]["folder"]
    path = folder.with_name(f"{folder.name}.lock")
    if not path.exists():
        return False
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return bool(file.read() == ACTIVE)
    return False


if __name__ == "__main__":
    raise SystemExit(not is_running(Path(sys.argv[1])))
