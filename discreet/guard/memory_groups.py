"""The memory of blocks, counted by the kernel: a control group (cgroup) for each.

It counts all that processes make the kernel keep: page tables, buffers of sockets and pipes, files
in memory. It needs a service manager that hands its service a group of its own (systemd's
`Delegate=memory`). Elsewhere the keeper of a block adds up what /proc tells of its processes.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

ROOT = Path("/sys/fs/cgroup")
GUARD = "guard"  # where the guard itself is: a group has either processes or groups with limits
BLOCK = "block-"
MEMORY = 1 << 20
COUNTED = "the kernel counts a block's memory"
ADDED_UP = (
    "a block's memory is added up by process, without buffers of sockets: systemd's "
    "Delegate=memory lets the kernel count it"
)


@dataclass(frozen=True)
class MemoryGroup:
    """The group of one block."""

    folder: Path

    def was_exceeded(self) -> bool:
        """True if the kernel has ended the block because it used more than its group may."""
        lines = (self.folder / "memory.events").read_text().splitlines()
        counts = dict(line.split() for line in lines)
        return int(counts["oom_kill"]) > 0

    def remove(self) -> None:
        """Ends what is left in the group, and takes it away."""
        (self.folder / "cgroup.kill").write_text("1")
        with suppress(OSError):  # a process is still ending: the service's end takes its group away
            self.folder.rmdir()


@dataclass(frozen=True)
class MemoryGroups:
    """The folder of the groups that this process may make."""

    folder: Path

    @classmethod
    def delegated(cls) -> Self | None:
        """The groups of this service; None if it was handed none whose memory is counted."""
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        paths = [line.removeprefix("0::") for line in lines if line.startswith("0::")]
        if not paths:
            return None
        own = ROOT / paths[0].lstrip("/")
        if own.name == GUARD:
            own = own.parent
        try:
            if "memory" not in (own / "cgroup.controllers").read_text().split():
                return None
            inside = (own / "cgroup.procs").read_text().split()
            if inside not in ([], [str(os.getpid())]):
                return None  # other programs are in it, which are not ours to move
            (own / GUARD).mkdir(exist_ok=True)
            for pid in inside:
                (own / GUARD / "cgroup.procs").write_text(pid)
            (own / "cgroup.subtree_control").write_text("+memory")
        except OSError:
            return None
        return cls(own)

    def new(self, number: int, megabytes: int) -> tuple[MemoryGroup, int]:
        """A group for a block, the `number`-th of those that run at once, and an open file: a
        process enters the group by writing "0" to it. Its name is new: the group of an earlier
        block may be there still, and decides nothing about this one."""
        folder = Path(tempfile.mkdtemp(prefix=f"{BLOCK}{number}-", dir=self.folder))
        (folder / "memory.max").write_text(str(megabytes * MEMORY))
        (folder / "memory.oom.group").write_text("1")  # all of its processes end together
        swap = folder / "memory.swap.max"
        if swap.exists():  # not in a kernel without swap
            swap.write_text("0")
        return MemoryGroup(folder), os.open(folder / "cgroup.procs", os.O_WRONLY)
