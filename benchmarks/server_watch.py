"""Looks at the processes and the files of a federation's server while a run lasts."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from discreet.deployment.local_federation import Federation
from discreet.deployment.superlink import server_apps

PARTS = ("gate", "link", "app")  # the gate, the SuperLink, the ServerApp
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Look:
    """What was seen at a moment: processor seconds of each part so far, and bytes of the state database and its log."""

    at: float
    processor: dict[str, float]
    database: int
    log: int


@dataclass
class Watch:
    """What is seen of a server.

    Attributes:
      federation: whose server it is.
      peaks: the largest resident memory of each part so far, in bytes.
      looks: in their order.
    """

    federation: Federation
    peaks: dict[str, int] = field(default_factory=dict)
    looks: list[Look] = field(default_factory=list)

    @property
    def database(self) -> Path:
        """The SuperLink's state."""
        return self.federation.folder / "state" / "superlink.db"

    def look(self) -> None:
        """A process that is gone can't be asked for its peak: look often."""
        processor = dict.fromkeys(PARTS, 0.0)
        for name, pid in server_processes(self.federation):
            self.peaks[name] = max(self.peaks.get(name, 0), peak_memory(pid))
            processor[name] += processor_seconds(pid)
        log = self.database.with_name(f"{self.database.name}-wal")
        self.looks.append(Look(time.monotonic(), processor, size_of(self.database), size_of(log)))

    def processor_between(self, start: float, end: float) -> dict[str, float]:
        """Processor seconds of each part between two moments of `time.monotonic`; between looks they grow evenly."""
        return {name: self._until(end, name) - self._until(start, name) for name in PARTS}

    def _until(self, moment: float, name: str) -> float:
        for before, after in pairwise(self.looks):
            if moment <= after.at:
                share = max(0.0, moment - before.at) / (after.at - before.at)
                # A ServerApp that is gone counts as none: its last seconds stay.
                return before.processor[name] + share * max(0.0, after.processor[name] - before.processor[name])
        return self.looks[-1].processor[name]

    def database_at(self, moment: float) -> int:
        """Bytes of the state database at the last look before a moment."""
        return next((look.database for look in reversed(self.looks) if look.at <= moment), 0)

    def forget_peaks(self) -> None:
        """Has the kernel count the peaks of the processes that run anew, from what they hold now."""
        for _, pid in server_processes(self.federation):
            Path(f"/proc/{pid}/clear_refs").write_text("5")

    def traffic(self) -> int:
        """Bytes that the SuperLink has counted between itself and all nodes so far, in both directions, in all runs."""
        with sqlite3.connect(f"file:{self.database}?mode=ro", uri=True, timeout=60) as connection:
            (found,) = connection.execute("SELECT COALESCE(SUM(bytes_sent + bytes_recv), 0) FROM run").fetchone()
        return int(found)


def server_processes(federation: Federation) -> Iterator[tuple[str, int]]:
    """The processes of the server by the part that they are."""
    starter = federation.processes["superlink"].pid
    yield "gate", federation.processes["gate"].pid
    for child in children_of(starter):
        yield "link", child
    for app in server_apps(starter):
        yield "app", app


def children_of(pid: int) -> list[int]:
    """The processes that a process has started itself; none if the system has no /proc."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def peak_memory(pid: int) -> int:
    """The largest resident memory of a process so far, in bytes; 0 if it can't be read."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def processor_seconds(pid: int) -> float:
    """Seconds that a process has computed so far, all threads together; 0 if it can't be read."""
    try:
        # The name in parentheses may hold anything; the eleventh and twelfth after it are user's and system's ticks.
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / TICKS


def size_of(path: Path) -> int:
    """Bytes of a file; 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
