"""The time and memory of a measured round, and what they make of a whole run."""

from __future__ import annotations

import multiprocessing
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RoundCost:
    """The seconds of a round, and the peak memory in bytes of this process and its workers."""

    seconds: float
    memory: int

    def lines(self, rounds: int, measured: str) -> Iterator[str]:
        """The time of so many rounds, and the memory. `measured`: what was measured."""
        minutes = self.seconds * rounds / 60
        yield f"{self.seconds:.2g} s a round, {minutes:.2g} minutes in all ({measured})"
        yield f"memory: {self.memory / 1e9:.2g} GB on this machine"


def peak_memory() -> int:
    """The bytes that this process and its workers have held at most. Pages that a worker shares
    with this process count twice."""
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ended = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    workers = sum(_peak_of(child.pid) for child in multiprocessing.active_children())
    return _in_bytes(usage) + max(_in_bytes(ended), workers)


def _in_bytes(usage: int) -> int:
    """macOS counts bytes, and other systems kilobytes."""
    if sys.platform == "darwin":
        return usage
    return 1024 * usage


def _peak_of(process: int | None) -> int:
    """The peak memory of another process in bytes; 0 if it has ended or the system does not say."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return 0
