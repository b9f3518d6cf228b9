"""Blocks of a guard whose service was handed a control group: the program of a machine that boots.

`python -m tests.guard.counted_blocks boot ATTACK,ATTACK...` runs as the first program of user-mode
Linux, which has what a container may not have: groups that count memory (cgroup version 2).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.guard.unprivileged import NOBODY, ROOT, as_nobody

GROUPS = Path("/sys/fs/cgroup")
SERVICE = GROUPS / "service"
HOME = Path("/tmp/home")
SECONDS = 20.0
LIMITS = {"memory-mb": 400, "disk-mb": 16, "processes": 40}
MOUNTS = (
    ("proc", "/proc", ""),
    ("sysfs", "/sys", ""),
    ("tmpfs", "/tmp", "mode=1777"),
    ("tmpfs", "/run", ""),
    ("cgroup2", str(GROUPS), "nsdelegate"),
)


def boot(attacks: str) -> None:
    """Makes the machine ready as a service manager does, and starts a guard without rights."""
    for kind, place, options in MOUNTS:
        with_options = ["-o", options] if options else []
        subprocess.run(["mount", "-t", kind, *with_options, kind, place], check=True)
    (GROUPS / "cgroup.subtree_control").write_text("+memory")
    SERVICE.mkdir()
    for path in (SERVICE, *SERVICE.iterdir()):
        os.chown(path, NOBODY, NOBODY)
    HOME.mkdir()
    os.chown(HOME, NOBODY, NOBODY)
    environment = {**os.environ, "HOME": str(HOME), "DISCREET_STATE": str(HOME / "state")}
    environment |= {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run(
        as_nobody([sys.executable, "-m", "tests.guard.counted_blocks", "play", attacks]),
        env=environment, cwd=ROOT, check=False,
        preexec_fn=enter,
    )  # fmt: skip


def enter() -> None:
    """Enters the group of the service."""
    (SERVICE / "cgroup.procs").write_text("0")


def play(attacks: Sequence[str]) -> None:
    """Prints a line of JSON for what comes of each attack."""
    from tests.guard import playing  # PyTorch, which wants the folders that `boot` has mounted

    playing.LIMITS = LIMITS
    played = playing.Played(HOME / "guard", "bubblewrap")
    played.give(SECONDS, at_once=1)
    groups = played.guard.sandbox.groups
    for attack in attacks:
        said = played.run(attack, [0], "train", target="")
        left = [] if groups is None else [path.name for path in groups.folder.glob("block-*")]
        print(json.dumps({"attack": attack, "groups": groups is not None, "left": left, **said}))
    sys.stdout.flush()
    played.guard.sandbox.close()


def main(verb: str, attacks: str) -> None:
    if verb == "play":
        play(attacks.split(","))
        return
    try:
        boot(attacks)
    finally:
        Path("/proc/sysrq-trigger").write_text("o")


if __name__ == "__main__":
    main(*sys.argv[1:3])  # the kernel adds words of its own
