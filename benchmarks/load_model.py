"""What a round costs the server of a federation, fitted to what `benchmarks.load_speed` measured, and its pictures.

    python -m benchmarks.load_model docs/results/load.csv --picture docs/pictures/load.svg \\
        --memory docs/pictures/load_memory.svg

The server's processor seconds of a round are modelled as

    a * seconds + calls + b * nodes + c * nodes * millions of parameters

`calls` are those of nodes that look for a message and find none: one for each node and pause, at the measured price of
one. `a` is what the server does for itself while the round lasts: its ServerApp looks for replies. Least squares of
relative errors, with coefficients of at least 0. The error is that of leaving one point out: for each pair of nodes and
parameters, the model is fitted to the other pairs and asked for this one.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from benchmarks.server_watch import PARTS
from discreet.reporting.drawing import Picture, alone, canvas, draw_line, log_axis, to_svg

POLL_SECONDS = 0.0145  # of the processor, for a call that finds no message: `benchmarks.load_speed --polls 200`
MILLION = 1e6
PEAKS = tuple(f"{name}_mib" for name in PARTS)

Row = dict[str, float]


@dataclass(frozen=True)
class Cost:
    """Processor seconds of the server: for each second of a round, for each node, and for each node's million."""

    second: float
    node: float
    million: float

    def of(self, *, nodes: float, millions: float, seconds: float = 0.0, calls: float = 0.0) -> float:
        """Of a round with so many nodes and millions of parameters, and so many calls that found no message.

        >>> Cost(second=0.1, node=0.3, million=0.2).of(nodes=100, millions=1)
        50.0
        """
        work = nodes * (self.node + millions * self.million)
        return self.second * seconds + POLL_SECONDS * calls + work


def fitted(rows: Sequence[Row]) -> Cost:
    """The model whose relative errors have the smallest squares."""
    used = np.array([processor_of(row) for row in rows])
    left = used - POLL_SECONDS * np.array([calls_of(row) for row in rows])
    columns = np.array([[row["seconds"], row["nodes"], row["nodes"] * row["parameters"] / MILLION] for row in rows])
    weights: NDArray[np.float64] = 1 / used
    return Cost(*(float(value) for value in nnls(columns * weights[:, None], left * weights)[0]))


def processor_of(row: Row) -> float:
    """Processor seconds of the gate, the SuperLink and the ServerApp."""
    return row["gate_seconds"] + row["link_seconds"] + row["app_seconds"]


def calls_of(row: Row) -> float:
    """How many calls of nodes found no message, if each looked once in a pause."""
    return row["nodes"] * row["seconds"] / row["pause"]


def modelled(cost: Cost, row: Row) -> float:
    """What the model says of a measured round."""
    size = {"nodes": row["nodes"], "millions": row["parameters"] / MILLION}
    return cost.of(**size, seconds=row["seconds"], calls=calls_of(row))


def errors(rows: Sequence[Row], costs: Sequence[Cost]) -> list[float]:
    """Relative errors of the models, one for each row."""
    return [modelled(cost, row) / processor_of(row) - 1 for row, cost in zip(rows, costs, strict=True)]


def left_out(rows: Sequence[Row]) -> list[Cost]:
    """For each row, the model of all rows with other nodes or parameters."""
    points = [(row["nodes"], row["parameters"]) for row in rows]
    fits = {
        point: fitted([row for row, its in zip(rows, points, strict=True) if its != point]) for point in set(points)
    }
    return [fits[point] for point in points]


def picture_of(rows: Sequence[Row], cost: Cost) -> Picture:
    """Processor seconds over nodes, what seconds and calls cost taken off: points measured, lines modelled."""
    title = "Processor seconds of the server a round, by the number of nodes"
    with canvas(height=3.6) as (figure, (axes,)):
        for place, (size, found) in enumerate(_by_size(rows)):
            work = [processor_of(row) - modelled(cost, row) + _work(cost, row) for row in found]
            ends = sorted({row["nodes"] for row in rows})
            draw_line(axes, [(nodes, cost.of(nodes=nodes, millions=size / MILLION)) for nodes in ends], place)
            pairs = [(row["nodes"], used) for row, used in zip(found, work, strict=True)]
            draw_line(axes, pairs, place, linestyle="none", marker="o")
        axes.set_ylabel("processor seconds")
        return _finished(figure, axes, title, rows)


def memory_picture_of(rows: Sequence[Row]) -> Picture:
    """Peaks of memory of the gate, the SuperLink and the ServerApp together over nodes."""
    title = "Memory of the server, by the number of nodes"
    with canvas(height=2.7) as (figure, (axes,)):
        for place, (_, found) in enumerate(_by_size(rows)):
            draw_line(axes, sorted({(row["nodes"], sum(row[name] for name in PEAKS)) for row in found}), place)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("MiB")
        return _finished(figure, axes, title, rows)


def _by_size(rows: Sequence[Row]) -> list[tuple[float, list[Row]]]:
    """The rows of each number of parameters."""
    sizes = sorted({row["parameters"] for row in rows})
    return [(size, [row for row in rows if row["parameters"] == size]) for size in sizes]


def _finished(figure: Any, axes: Any, title: str, rows: Sequence[Row]) -> Picture:
    log_axis(axes, "x", [row["nodes"] for row in rows])
    axes.set_xlabel("nodes")
    labels = tuple((place, f"{size / MILLION:g} million parameters") for place, (size, _) in enumerate(_by_size(rows)))
    return Picture(title, to_svg(figure, title), labels)


def _work(cost: Cost, row: Row) -> float:
    return cost.of(nodes=row["nodes"], millions=row["parameters"] / MILLION)


def read_rows(path: Path) -> list[Row]:
    """The rows of light nodes in a CSV of `benchmarks.load_speed`."""
    with path.open(newline="") as file:
        found = [row for row in csv.DictReader(file) if row.pop("kind") == "light"]
    return [{name: float(value) for name, value in row.items()} for row in found]


def main(words: Sequence[str]) -> int:
    """Prints the model and its errors, and what it says of other federations; draws it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.load_model", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("measured", type=Path, help="the CSV of benchmarks.load_speed")
    parser.add_argument("--nodes", type=int, nargs="*", default=(100, 1000), help="reckoned for so many")
    parser.add_argument("--sizes", type=int, nargs="*", default=(100_000, 1_000_000, 5_000_000))
    parser.add_argument("--picture", type=Path, help="draw the processor seconds there, as SVG")
    parser.add_argument("--memory", type=Path, help="draw the memory there, as SVG")
    arguments = parser.parse_args(words)
    rows = read_rows(arguments.measured)
    cost = fitted(rows)
    print(f"{len(rows)} rounds: {cost}")
    for what, costs in (("fit", [cost] * len(rows)), ("left out", left_out(rows))):
        sizes = np.abs(errors(rows, costs))
        print(f"relative error, {what}: median {np.median(sizes):.3f}, largest {sizes.max():.3f}")
    for nodes in arguments.nodes:
        for size in arguments.sizes:
            print(f"{nodes} nodes, {size} parameters: {cost.of(nodes=nodes, millions=size / MILLION):.4g} s of work")
    if arguments.picture:
        arguments.picture.write_text(alone(picture_of(rows, cost)))
    if arguments.memory:
        arguments.memory.write_text(alone(memory_picture_of(rows)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
