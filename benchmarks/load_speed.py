"""What a round of many nodes costs the server, by the number of nodes and the size of the model: `discreet benchmark
load`, or `python -m benchmarks.load_speed --nodes 4 40 --sizes 100000 5000000 --out docs/results/load.csv`.

The federation of `benchmarks.deployment_speed` (a SuperLink, a gate, TLS, node keys), with nodes that do nothing: by
default those of `benchmarks.light_nodes`, which a server can't tell from SuperNodes; with `--kind supernode` a
SuperNode process each. Processor seconds of the server's three processes are measured beside the clock, which other
programs on the machine disturb more.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.supernode.fleet_http_connection import http_request_response
from rich.console import Console

from benchmarks.deployment_speed import MEBIBYTE, PATIENCE_SECONDS, WARM_UP, floor_rounds, make_data
from benchmarks.server_watch import PARTS, Watch
from discreet.cli.benchmark import table_of
from discreet.deployment.local_federation import Federation, federation_of, make_secrets, wait_until

NODES, SIZES = (4, 10, 20, 40), (100_000, 1_000_000, 5_000_000)
KINDS = ("light", "supernode")
PAUSE_SECONDS = 3.0  # between two looks of a light node for a message; a SuperNode's are 0.5 to 3 s

Row = dict[str, Any]


def rows(
    nodes: Sequence[int] = NODES, sizes: Sequence[int] = SIZES, *, rounds: int = 3, kind: str = KINDS[0]
) -> list[Row]:
    """A row for each round: of each number of nodes, and with these of each number of parameters.

    `seconds` by the clock, and the server's processor seconds: of the gate, the SuperLink (link) and the ServerApp
    (app). The others are of all rounds of a size: peaks of memory of the three, in MiB; bytes between nodes and
    SuperLink, a round; the state database at the end of the round, and its peak and that of its log, in MiB.
    """
    return [row for count in nodes for row in rows_of(count, sizes, rounds=rounds, kind=kind)]


def rows_of(nodes: int, sizes: Sequence[int], *, rounds: int, kind: str) -> Iterator[Row]:
    """Starts a federation, and measures it with each size, the smallest first: memory that was used is kept."""
    with tempfile.TemporaryDirectory() as folder, _federation(nodes, Path(folder), kind=kind) as federation:
        first = WARM_UP if kind == "supernode" else 0  # of light nodes no first round installs anything
        for size in sorted(sizes):
            watch = Watch(federation)
            watch.forget_peaks()
            before = watch.traffic()
            facts, watch = floor_rounds(federation, nodes=nodes, rounds=rounds + first, size=size, name=f"floor-{size}")
            traffic = (watch.traffic() - before) / (rounds + first)
            for row in _rounds(facts, watch, first=first):
                yield {
                    "kind": kind,
                    "pause": PAUSE_SECONDS,
                    "nodes": nodes,
                    "parameters": size,
                    **row,
                    "bytes": traffic,
                }


def _rounds(facts: dict[str, Any], watch: Watch, *, first: int) -> Iterator[Row]:
    ends = facts["ends"]
    whole = {
        **{f"{name}_mib": watch.peaks.get(name, 0) / MEBIBYTE for name in PARTS},
        "database_peak_mib": max(look.database for look in watch.looks) / MEBIBYTE,
        "log_peak_mib": max(look.log for look in watch.looks) / MEBIBYTE,
        "load": os.getloadavg()[0],
    }
    for number in range(first, len(ends) - 1):
        start, end = ends[number], ends[number + 1]
        processor = {f"{name}_seconds": used for name, used in watch.processor_between(start, end).items()}
        numbers = {"round": number + 1, "replies": facts["replies"][number], "seconds": end - start}
        yield {**numbers, **processor, "database_mib": watch.database_at(end) / MEBIBYTE, **whole}


def poll_row(calls: int) -> Row:
    """Processor milliseconds of the gate and of the SuperLink for a node's call that finds no message."""
    with tempfile.TemporaryDirectory() as folder, _server(Path(folder), ["node-0"]) as federation:
        private = load_ssh_private_key((federation.secrets / "nodes" / "node-0.key").read_bytes(), None)
        if not isinstance(private, ec.EllipticCurvePrivateKey):
            raise TypeError("keys of nodes are on an elliptic curve")
        address, authority = f"127.0.0.1:{federation.gate_port}", federation.authority.read_bytes()
        with http_request_response(address, False, authority, (private, private.public_key())) as connection:
            used = [seconds_of(federation, connection[1], count) for count in (calls // 10, calls)][1]
    return {"calls": calls, **{f"{name}_ms": 1000 * used[name] / calls for name in ("gate", "link")}}


def seconds_of(federation: Federation, call: Callable[[], object], calls: int) -> dict[str, float]:
    """Processor seconds of each part of the server while something calls it so many times, one after the other."""
    watch = Watch(federation)
    watch.look()
    for _ in range(calls):
        call()
    watch.look()
    before, after = watch.looks
    return {name: after.processor[name] - before.processor[name] for name in PARTS}


@contextmanager
def _federation(nodes: int, folder: Path, *, kind: str) -> Iterator[Federation]:
    if kind == "supernode":
        words = ["--data", str(make_data(folder / "data")), "--task", "digits"]
        with federation_of([words] * nodes, folder) as federation:
            yield federation
        return
    names = [f"node-{number}" for number in range(nodes)]
    with _server(folder, names) as federation:
        start_light_nodes(federation, names)
        yield federation


@contextmanager
def _server(folder: Path, names: Sequence[str]) -> Iterator[Federation]:
    federation = Federation(folder, make_secrets(folder / "secrets", names), pause=PAUSE_SECONDS)
    try:
        federation.start_superlink()
        yield federation
    finally:
        federation.stop()


def start_light_nodes(federation: Federation, names: Sequence[str]) -> None:
    """Starts the process of all nodes, and waits until each has been let in."""
    ready = federation.folder / "nodes-ready"
    command = [
        *(sys.executable, "-m", "benchmarks.light_nodes", "--superlink", f"127.0.0.1:{federation.gate_port}"),
        *("--authority", str(federation.authority), "--ready", str(ready), "--pause", str(PAUSE_SECONDS)),
        *(str(federation.secrets / "nodes" / f"{name}.key") for name in names),
    ]
    process = federation.start("nodes", command)
    wait_until(lambda: ready.exists() or process.poll() is not None, PATIENCE_SECONDS, "all nodes are let in")


def main(words: Sequence[str]) -> int:
    """Measures other points than the section has."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load_speed", description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="parameters of the model")
    parser.add_argument("--rounds", type=int, default=3, help="of each point; of SuperNodes after a first one")
    parser.add_argument("--kind", choices=KINDS, default=KINDS[0], help="light: threads of one process")
    parser.add_argument("--out", type=Path, help="add a row a point there, as CSV")
    parser.add_argument("--polls", type=int, metavar="CALLS", help="instead: what a call costs that finds no message")
    arguments = parser.parse_args(words)
    found = [] if arguments.polls is None else [poll_row(arguments.polls)]
    for nodes in arguments.nodes if arguments.polls is None else ():
        for row in rows_of(nodes, arguments.sizes, rounds=arguments.rounds, kind=arguments.kind):
            found.append(row)
            if arguments.out:
                add_row(arguments.out, row)
    Console().print(table_of(found))
    return 0


def add_row(path: Path, row: Row) -> None:
    """Appends a row, after the names of the columns if it is the first."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow({name: f"{value:.6g}" if isinstance(value, float) else value for name, value in row.items()})


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
