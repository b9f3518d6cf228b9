"""The load of many nodes on one server: `discreet benchmark load`.

A SuperLink and its node proxy, with TLS and node keys, and light nodes: threads of one process,
each with its own key and connection, and no ClientApp. A server can't distinguish them from
SuperNodes. CPU seconds of the server's three processes are measured beside wall-clock time, which
other programs on the machine disturb more.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.empty_app.empty_client import answer_to
from benchmarks.raw_node import raw_node
from benchmarks.side_by_side import Row
from discreet.deployment.flower_home import wait_until
from discreet.deployment.local_federation import Federation, empty_federation
from discreet.deployment.superlink import SERVER_APP
from discreet.run_files.run_folder import RunFolder
from discreet.simulation.processes import child_processes

EMPTY_APP = Path(__file__).resolve().parent / "empty_app"
NODES, SIZES = (4, 10, 20, 40), (100_000, 1_000_000, 5_000_000)
PARTS = ("gate", "link", "app")  # the node proxy, the SuperLink, the ServerApp
PAUSE_SECONDS = 3.0  # between two polls of a light node; a SuperNode's pauses are 0.5 to 3 s
PATIENCE_SECONDS, LOOK_SECONDS = 3600.0, 0.25
TICKS, MEBIBYTE = os.sysconf("SC_CLK_TCK"), 2**20


def rows(
    nodes: Sequence[int] = NODES, sizes: Sequence[int] = SIZES, *, rounds: int = 3
) -> list[Row]:
    """A row for each number of nodes and of parameters: wall-clock seconds of a round, CPU seconds
    of the node proxy (gate), the SuperLink (link) and the ServerApp (app) for a round, and their
    peaks of resident memory in MiB."""
    return [row for count in nodes for row in rows_of(count, sizes, rounds=rounds)]


def rows_of(nodes: int, sizes: Sequence[int], *, rounds: int) -> Iterator[Row]:
    """Starts a federation, and measures it with each size, the smallest first, as processes keep
    used memory."""
    with tempfile.TemporaryDirectory() as folder, _federation(nodes, Path(folder)) as federation:
        for size in sorted(sizes):
            watch = ServerWatch(federation)
            words = (
                f"nodes={nodes}",
                f"rounds={rounds}",
                f"size={size}",
                f"timeout={PATIENCE_SECONDS}",
            )
            run = federation.run(f"floor-{size}", *words, app=EMPTY_APP)
            finish(federation, run, watch)
            facts = json.loads(run.path.with_suffix(".json").read_text())
            yield {
                "nodes": nodes,
                "parameters": size,
                "replies": sum(facts["replies"]) / rounds,
                "seconds": sum(facts["seconds"]) / rounds,
                **{
                    f"{name}_seconds": used / rounds
                    for name, used in watch.processor_seconds().items()
                },
                **{f"{name}_mib": watch.peaks.get(name, 0) / MEBIBYTE for name in PARTS},
            }


class ServerWatch:
    """CPU seconds and peaks of memory of a server's processes, from the creation of this object to
    its last reading."""

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self.peaks: dict[str, int] = {}
        self._first: dict[int, float] = {}
        self._last: dict[int, tuple[str, float]] = {}
        for _, pid in self._processes():
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets the peak
        self.look()
        self._first = {pid: seconds for pid, (_, seconds) in self._last.items()}

    def look(self) -> None:
        """Reads all processes. It must be called often, as the peak of an ended process can't be
        read."""
        for name, pid in self._processes():
            try:
                status, stat = (
                    Path(f"/proc/{pid}/{file}").read_text() for file in ("status", "stat")
                )
            except OSError:
                continue
            peak = next(
                int(line.split()[1]) * 1024
                for line in status.splitlines()
                if line.startswith("VmHWM:")
            )
            self.peaks[name] = max(self.peaks.get(name, 0), peak)
            # The name in parentheses may contain anything; the eleventh and twelfth word after it
            # are ticks.
            words = stat.rpartition(")")[2].split()
            self._last[pid] = name, (int(words[11]) + int(words[12])) / TICKS

    def processor_seconds(self) -> dict[str, float]:
        """CPU seconds of each part between the first and the last reading."""
        used = dict.fromkeys(PARTS, 0.0)
        for pid, (name, seconds) in self._last.items():
            used[name] += seconds - self._first.get(pid, 0.0)
        return used

    def _processes(self) -> Iterator[tuple[str, int]]:
        starter = self.federation.processes["superlink"].pid
        yield "gate", self.federation.processes["gate"].pid
        for child in Path(f"/proc/{starter}/task/{starter}/children").read_text().split():
            yield "link", int(child)
        for app in child_processes(starter, SERVER_APP):
            yield "app", app


def finish(federation: Federation, folder: RunFolder, watch: ServerWatch) -> None:
    """Waits for the end of a started run, and reads the server's processes meanwhile."""
    name = f"run-{folder.path.name}"
    process = federation.processes[name]

    def over() -> bool:
        watch.look()
        return process.poll() is not None

    wait_until(
        over, PATIENCE_SECONDS, f"{name} is over; see {federation.log(name)}", every=LOOK_SECONDS
    )


@contextmanager
def _federation(nodes: int, folder: Path) -> Iterator[Federation]:
    names = [f"node-{number}" for number in range(nodes)]
    with empty_federation(folder, names, pause=PAUSE_SECONDS) as federation:
        ready, keys = (
            folder / "nodes-ready",
            [federation.secrets / "nodes" / f"{name}.key" for name in names],
        )
        command = [
            sys.executable,
            "-m",
            "benchmarks.load_speed",
            f"127.0.0.1:{federation.proxy_port}",
            federation.authority,
            ready,
            *keys,
        ]
        process = federation.start("nodes", [str(word) for word in command])
        wait_until(
            lambda: ready.exists() or process.poll() is not None,
            PATIENCE_SECONDS,
            "all nodes are let in",
        )
        yield federation


def main() -> None:
    """The process of the light nodes, which answers until it is told to end."""
    address, authority, ready, *keys = sys.argv[1:]
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    with ExitStack() as nodes:
        for key in map(Path, keys):
            node = raw_node(
                address,
                authority=Path(authority),
                key=key,
                behaviour=answer_to,
                pause=PAUSE_SECONDS,
            )
            nodes.enter_context(node)
        Path(ready).touch()
        asked.wait()


if __name__ == "__main__":
    main()
