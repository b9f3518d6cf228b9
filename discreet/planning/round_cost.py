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
        whole = duration(self.seconds * rounds)
        yield f"{duration(self.seconds)} a round, {whole} in all ({measured})"
        yield self.memory_line

    @property
    def memory_line(self) -> str:
        """The memory, in words."""
        return f"memory: {self.memory / 1e9:.2g} GB on this machine"


def duration(seconds: float) -> str:
    """A time as people write it.

    >>> duration(0.0521), duration(38.2), duration(138), duration(7400)
    ('0.052 s', '38 s', '2 min 18 s', '2 h 3 min')
    """
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 100:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


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
