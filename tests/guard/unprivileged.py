"""Runs a program as a user without rights, as the guard wants it, also where the tests run as root.

Root's own home may hold Python, and be closed to others. Then the program runs in a mount namespace
in which what it needs of it, and nothing else, lies open.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

NOBODY = 65534
ROOT = Path(__file__).resolve().parents[2]


def needed() -> list[Path]:
    """The folders that a guard reads: Python, its packages, the checkout."""
    places = dict.fromkeys([sys.base_prefix, sys.prefix, str(ROOT)])
    return [Path(each).resolve() for each in places]


def closed_above(path: Path) -> Path | None:
    """The topmost folder above a path that a stranger may not go through."""
    above = [each for each in reversed(path.parents) if not each.stat().st_mode & 0o001]
    return above[0] if above else None


def as_nobody(command: Sequence[str], *, read_only: bool = False, user: int = NOBODY) -> list[str]:
    """The command line that runs a command without rights. `read_only`: what `needed` names is
    mounted so. `user`: of a number that nobody else has."""
    if os.geteuid() != 0:
        return [*command]
    script = ["set -e", "mount --make-rprivate /"]
    places = needed()
    hidden = dict.fromkeys(each for path in places if (each := closed_above(path)) is not None)
    if hidden or read_only:
        script.append("keep=$(mktemp -d)")
        script.append('mount -t tmpfs none "$keep"')
        for number, path in enumerate(places):
            script.append(f'mkdir "$keep/{number}"; mount --bind "{path}" "$keep/{number}"')
        script += [f'mount -t tmpfs -o mode=755 none "{folder}"' for folder in hidden]
        for number, path in enumerate(places):
            script.append(f'mkdir -p "{path}"; mount --bind "$keep/{number}" "{path}"')
            if read_only:
                script.append(f'mount -o remount,bind,ro "{path}"')
        if read_only:
            script.append(
                "for p in /usr /etc; do mount --bind $p $p; mount -o remount,bind,ro $p; done"
            )
    drop = f"setpriv --reuid {user} --regid {user} --clear-groups"
    script.append(f'exec {drop} -- "$@"')
    return ["unshare", "--mount", "sh", "-c", "\n".join(script), "sh", *command]


def why_not() -> str:
    """The reason why nothing can run without rights here; empty if it can."""
    tried = subprocess.run(
        as_nobody([sys.executable, "-c", ""]), capture_output=True, text=True, check=False
    )
    return tried.stderr.strip().splitlines()[-1] if tried.returncode else ""
