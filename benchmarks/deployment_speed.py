"""A real federation under load: `discreet benchmark deployment`, or with another number of nodes
`python -m benchmarks.deployment_speed --nodes 40`.

One SuperLink, a gate, and as many SuperNode processes as are asked for, all on this machine, with TLS and node keys.
Messages hold a model of a million parameters. Two things are measured side by side:

- floor: a ClientApp that sends back what it was sent, and a ServerApp that adds up;
- ours: the same federation, the same model, with user-level privacy.

Both are measured twice: with each ClientApp started anew, as Flower does it, and forked from a process that is ready
(`discreet/deployment/flower_fixes/warm_clients.py`).
If the machine has fewer cores than nodes, starting ClientApps is most of a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.server_watch import Watch
from discreet.cli.benchmark import table_of
from discreet.deployment.local_federation import Federation, federation_of, wait_until
from discreet.federated.run_folder import RunFolder
from examples.million import million

EMPTY_APP = Path(__file__).resolve().parent / "empty_app"
MODEL = f"{million.__module__}:{million.__name__}"
PATIENCE_SECONDS = 3600.0
LOOK_SECONDS = 0.25
WARM_UP = 1  # the first round of a run installs the app on every node
EXAMPLES = 30  # of each node
CLASSES = 10  # of the task digits
MEBIBYTE = 2**20

Rows = list[dict[str, Any]]


def make_data(folder: Path) -> Path:
    """Data of a node's own that allow this model: made up, since nothing is learned here."""
    folder.mkdir(parents=True)
    inputs = np.arange(EXAMPLES * 64, dtype=np.float32).reshape(EXAMPLES, 1, 8, 8) % 17
    np.savez(folder / "made.npz", inputs=inputs, digit=np.arange(EXAMPLES) % CLASSES)
    facts = f'format = "npz"\nfile = "made.npz"\ntarget = "digit"\nlow = 0\nhigh = 16\nmodel = "{MODEL}"\n'
    (folder / "data.toml").write_text(facts)
    return folder


def rows(nodes: int = 20, rounds: int = 3, *, folder: Path | None = None) -> Rows:
    """The floor's rows and ours: replies in all rounds, seconds of a round (the median), rounds a minute, and the ratio
    of seconds to Flower's floor.

    Then the largest memory so far of the gate, the SuperLink (link) and the ServerApp (app), in MiB.
    """
    found = []
    with _folder(folder) as scratch:
        words = ["--data", str(make_data(scratch / "data")), "--task", "digits"]
        for how, cold in (("started anew", True), ("ready", False)):
            with federation_of([words] * nodes, scratch / ("cold" if cold else "warm"), cold=cold) as federation:
                found.append(row_of(f"floor, apps {how}", nodes, **_floor(federation, nodes=nodes, rounds=rounds)))
                found.append(
                    row_of(f"ours, apps {how}", nodes, **discreet_rounds(federation, nodes=nodes, rounds=rounds))
                )
    return [row | {"ratio": row["seconds"] / found[0]["seconds"]} for row in found]


def row_of(
    what: str, nodes: int, *, seconds: list[float], replies: list[int], memory: Mapping[str, int]
) -> dict[str, Any]:
    """The row of a series: the median of its rounds, and peaks of memory in MiB."""
    median = statistics.median(seconds)
    peaks = {name: round(size / MEBIBYTE) for name, size in memory.items()}
    return {"what": what, "nodes": nodes, "replies": sum(replies), "seconds": median, "a minute": 60 / median, **peaks}


def _floor(federation: Federation, *, nodes: int, rounds: int) -> dict[str, Any]:
    size = sum(parameter.numel() for parameter in million((1, 8, 8), CLASSES).parameters())
    facts, watch = floor_rounds(federation, nodes=nodes, rounds=rounds + WARM_UP, size=size)
    return {"seconds": facts["seconds"][WARM_UP:], "replies": facts["replies"][WARM_UP:], "memory": watch.peaks}


def floor_rounds(
    federation: Federation, *, nodes: int, rounds: int, size: int, name: str = "floor"
) -> tuple[dict[str, Any], Watch]:
    """Rounds with nodes that do nothing: what the ServerApp of `empty_app` wrote, and what was seen of the server."""
    words = (f"nodes={nodes}", f"rounds={rounds}", f"size={size}", f"timeout={PATIENCE_SECONDS}")
    folder, watch = _finish(federation, lambda: federation.run(name, *words, app=EMPTY_APP))
    facts: dict[str, Any] = json.loads(folder.path.with_suffix(".json").read_text())
    return facts, watch


def discreet_rounds(federation: Federation, *, nodes: int, rounds: int, more: Sequence[str] = ()) -> dict[str, Any]:
    """Seconds and replies of rounds with user-level privacy, and peaks of memory; `more` are further settings."""
    words = (f"rounds={rounds + WARM_UP}", f"data.num_clients={nodes}", f"sampling.min_nodes={nodes}")
    light = (f"model.name={MODEL}", "training.epochs=1", f"training.batch_size={EXAMPLES}", "sampling.kind=everyone")
    privacy = ("privacy.user.noise_multiplier=4", f"privacy.delta={0.5 / nodes}")
    patient = f"server.round_timeout={PATIENCE_SECONDS}"
    name = "secure" if more else "discreet"
    given = (*words, *light, *privacy, *more, patient)
    folder, watch = _finish(federation, lambda: federation.run(name, *given))
    measured = folder.read_metrics()[WARM_UP:]
    seconds, replies = [row["seconds"] or 0.0 for row in measured], [int(row["replies"] or 0) for row in measured]
    return {"seconds": seconds, "replies": replies, "memory": watch.peaks}


def _finish(federation: Federation, start: Callable[[], RunFolder]) -> tuple[RunFolder, Watch]:
    """Runs to the end, and looks at the server meanwhile."""
    folder, watch = start(), Watch(federation)
    process = federation.processes[f"run-{folder.path.name}"]

    def over() -> bool:
        ended = process.poll() is not None
        watch.look()
        return ended

    log = federation.log(f"run-{folder.path.name}")
    wait_until(over, PATIENCE_SECONDS, f"{folder.path.name} is over; see {log}", every=LOOK_SECONDS)
    return folder, watch


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def main(words: Sequence[str]) -> int:
    """Measures with another number of nodes than the section has."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deployment_speed", description=__doc__)
    parser.add_argument("--nodes", type=int, default=20, help="SuperNode processes; each takes about 300 MB")
    parser.add_argument("--rounds", type=int, default=3, help="of each series, after a first one that is not counted")
    parser.add_argument("--folder", type=Path, help="where logs and runs are kept (default: a folder that is removed)")
    arguments = parser.parse_args(words)
    Console().print(table_of(rows(arguments.nodes, arguments.rounds, folder=arguments.folder)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
