"""Looks at the processes of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

STARTER = b"flower-superexec"  # starts ServerApps for a SuperLink, ClientApps for a SuperNode


def below(ancestor: int, program: bytes) -> list[int]:
    """The processes of a program below a process; none where the system has no /proc."""
    parents: dict[int, int] = {}
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            pid, words = int(entry.name), (entry / "cmdline").read_bytes().split(b"\0")
            # The name in parentheses may hold anything; the parent is the second field after it.
            parents[pid] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue  # it has ended in the meantime
        if any(word.endswith(program) for word in words[:2]):
            found.append(pid)
    return [pid for pid in found if ancestor in _ancestors(pid, parents)]


def _ancestors(pid: int, parents: dict[int, int]) -> Iterator[int]:
    while pid in parents:
        pid = parents[pid]
        yield pid
