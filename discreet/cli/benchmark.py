"""Measures things side by side in one run, and prints a table for each section.

Peers that are not installed are named and skipped. Times depend on what else the machine does: the load is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from discreet.places import own_files

SECTIONS = {
    "per_example": "clipped per-example gradients against plain ones, and whole steps against Opacus",
    "loop": "a step of DPSGD against the plain step and Opacus: ResNet, transformer, embeddings",
    "cohort": "virtual clients per second, batched and one by one, beside pfl-research",
    "cohort_scale": "time and memory against cohort and population, up to a million virtual clients",
    "ray": "chunks as tasks of a Ray cluster against forked workers: rounds and whole runs",
    "load": "4 to 40 nodes that do nothing, 0.1 to 5 million parameters: what a round costs the server",
    "secure_round": "20 SuperNodes, a million parameters: a round under secure aggregation against one in the clear",
}

EXAMPLES = """
examples:
  discreet benchmark
  discreet benchmark per_example cohort --json measured.json
"""
Rows = list[dict[str, Any]]


def run_sections(names: Sequence[str]) -> dict[str, Rows]:
    """The rows of each section, printed as they come."""
    console, results = Console(), {}
    for name in names:
        rows: Callable[[], Rows] = import_module(f"benchmarks.{name}_speed").rows
        console.rule(f"{name}: {SECTIONS[name]}")
        results[name] = rows()
        console.print(table_of(results[name]))
    return results


def table_of(rows: Rows) -> Table:
    """Rows as a table, one column for each name that any of them has."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*columns)
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in columns))
    return table


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def machine() -> dict[str, Any]:
    """The machine that it was measured on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "load": os.getloadavg(),
    }


def main(words: Sequence[str]) -> int:
    """The command line."""
    listed = "\n".join(f"  {name:12} {what}" for name, what in SECTIONS.items())
    parser = argparse.ArgumentParser(
        prog="discreet benchmark",
        description=f"{__doc__}\nsections:\n{listed}",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help="what to measure (default: all sections)")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    chosen = parser.parse_args(words)
    sys.path.append(str(own_files()))  # a wheel brings the folder benchmarks there
    unknown = [name for name in chosen.sections if name not in SECTIONS]
    if unknown:
        print(f"discreet: no section {unknown[0]}; known are {', '.join(SECTIONS)}", file=sys.stderr)
        return 2
    results: dict[str, Any] = {"machine": machine()}
    print(json.dumps(results["machine"]))
    results |= run_sections(chosen.sections or list(SECTIONS))
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0
