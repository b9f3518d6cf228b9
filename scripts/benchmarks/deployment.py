"""A real federation under load: `python -m scripts.benchmarks.deployment --nodes 20`.

One SuperLink, a gate, and as many SuperNode processes as are asked for, all on this machine, with TLS and node keys.
Three things are measured in it:

- load: rounds per minute and the memory of the server, with messages of a model of a million parameters;
- floor: a round of a ClientApp that does nothing, at the size of the default model;
- ours: a round of Discreet's ClientApp at that size, as a multiple of the floor.

Flower starts a process for every message. Where the machine has fewer cores than nodes, that is most of a round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from discreet.tasks.models import build_model
from scripts.local_federation import Federation, federation_of, wait_until

EMPTY_APP = Path(__file__).resolve().parent / "empty_app"
MILLION = 1_000_000
PATIENCE_SECONDS = 3600.0
WARM_UP = 1  # the first round of a run installs the app on every node


@dataclass(frozen=True)
class Measured:
    """A series of rounds. `seconds` without the first round; `memory` in bytes, by process."""

    name: str
    nodes: int
    size: int
    seconds: list[float]
    replies: list[int]
    memory: dict[str, int]

    @property
    def median(self) -> float:
        """Seconds of a round."""
        return statistics.median(self.seconds)

    def line(self) -> str:
        """For people."""
        memory = "  ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in self.memory.items())
        return (
            f"{self.name:6} {self.nodes} nodes  {self.size} parameters  {self.median:.2f} s a round  "
            f"{60 / self.median:.2f} rounds a minute  replies {self.replies}  {memory}"
        )


def peak_memory(federation: Federation) -> dict[str, int]:
    """The largest resident memory so far of the SuperLink and the gate; empty where the system has no /proc."""
    found = {}
    for name, pid in _server_processes(federation):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                found[name] = int(line.split()[1]) * 1024
    return found


def _server_processes(federation: Federation) -> Iterator[tuple[str, int]]:
    if not Path("/proc/self/task").is_dir():
        return
    yield "gate", federation.processes["gate"].pid
    starter = federation.processes["superlink"].pid
    for child in Path(f"/proc/{starter}/task/{starter}/children").read_text().split():
        yield "SuperLink", int(child)


def empty_rounds(federation: Federation, name: str, *, nodes: int, rounds: int, size: int) -> Measured:
    """Rounds of the ClientApp that does nothing."""
    words = (f"nodes={nodes}", f"rounds={rounds + WARM_UP}", f"size={size}", f"timeout={PATIENCE_SECONDS}")
    result = federation.run(name, *words, app=EMPTY_APP).path.with_suffix(".json")
    wait_until(result.exists, PATIENCE_SECONDS, f"{name} is over; see {federation.log(f'run-{name}')}")
    wait_until(lambda: federation.processes[f"run-{name}"].poll() is not None, PATIENCE_SECONDS, f"{name} has ended")
    facts = json.loads(result.read_text())
    memory = {"ServerApp": facts["memory"], **peak_memory(federation)}
    return Measured(name, nodes, size, facts["seconds"][WARM_UP:], facts["replies"][WARM_UP:], memory)


def our_rounds(federation: Federation, *, nodes: int, rounds: int, size: int) -> Measured:
    """Rounds of Discreet with user-level privacy and the default model."""
    words = (f"rounds={rounds + WARM_UP}", f"data.num_clients={nodes}", f"sampling.min_nodes={nodes}")
    privacy = ("sampling.kind=everyone", "privacy.user.noise_multiplier=4", f"privacy.delta={0.5 / nodes}")
    folder = federation.run("ours", *words, *privacy, f"server.round_timeout={PATIENCE_SECONDS}")
    federation.finish(folder, seconds=PATIENCE_SECONDS)
    rows = folder.read_metrics()[WARM_UP:]
    seconds, replies = [row["seconds"] or 0.0 for row in rows], [int(row["replies"] or 0) for row in rows]
    return Measured("ours", nodes, size, seconds, replies, peak_memory(federation))


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def main(words: Sequence[str]) -> int:
    """Measures, prints a line for each series, and writes them as JSON where asked."""
    parser = argparse.ArgumentParser(prog="python -m scripts.benchmarks.deployment", description=__doc__)
    parser.add_argument("--nodes", type=int, default=20, help="SuperNode processes; each takes about 300 MB")
    parser.add_argument("--rounds", type=int, default=5, help="of each series, after a first one that is not counted")
    parser.add_argument("--size", type=int, default=MILLION, help="parameters of the messages under load")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--folder", type=Path, help="where logs and runs are kept (default: a folder that is removed)")
    arguments = parser.parse_args(words)
    nodes, rounds = arguments.nodes, arguments.rounds
    ours = sum(parameter.numel() for parameter in build_model("mlp", (1, 8, 8), 10, seed=1).parameters())
    with _folder(arguments.folder) as folder, federation_of(nodes, folder) as federation:
        series = [empty_rounds(federation, "load", nodes=nodes, rounds=rounds, size=arguments.size)]
        print(series[-1].line(), flush=True)
        series.append(empty_rounds(federation, "floor", nodes=nodes, rounds=rounds, size=ours))
        print(series[-1].line(), flush=True)
        series.append(our_rounds(federation, nodes=nodes, rounds=rounds, size=ours))
        print(series[-1].line(), flush=True)
    ratio = series[2].median / series[1].median
    print(f"ours / floor: {ratio:.2f}  ({os.cpu_count()} cores, load {os.getloadavg()[0]:.1f})")
    if arguments.json:
        arguments.json.write_text(json.dumps([vars(measured) for measured in series], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
