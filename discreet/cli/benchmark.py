"""Measures things side by side in one run, and prints a table for each section; without a SECTION, all of them.

sections:
  per_example   clipped per-example gradients against plain ones, and whole steps against Opacus
  loop          a step of DPSGD against the plain step and Opacus: models as people write them
  cohort        virtual clients per second, batched and sequential, beside pfl-research
  cohort_scale  time and memory against cohort and population, up to a million virtual clients
  ray           chunks as tasks of a Ray cluster against forked workers: rounds and whole runs
  load          4 to 40 nodes that do nothing, 0.1 to 5 million parameters: what a round costs the server
  secure_round  20 SuperNodes, a million parameters: a round under secure aggregation against one in the clear

examples:
  discreet benchmark
  discreet benchmark per_example cohort --json measured.json
"""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from discreet.cli.console import print_table
from discreet.settings.places import own_files
from discreet.settings.rules import ConfigError

SECTIONS = ("per_example", "loop", "cohort", "cohort_scale", "ray", "load", "secure_round")


def command(
    sections: Annotated[list[str] | None, typer.Argument(metavar="SECTION ...")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="also write the rows to this file")] = None,
) -> None:
    """Measures, prints, and writes the rows of each section."""
    if unknown := [name for name in sections or () if name not in SECTIONS]:
        raise ConfigError(f"no section {unknown[0]}; known are {', '.join(SECTIONS)}")
    sys.path.append(str(own_files()))  # a wheel brings the folder benchmarks there
    machine = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    cores = {"cores": os.cpu_count(), "torch_threads": torch.get_num_threads(), "load": os.getloadavg()}
    results: dict[str, Any] = {"machine": machine | cores}
    print(json.dumps(results["machine"]))
    for name in sections or SECTIONS:
        print(name)
        results[name] = import_module(f"benchmarks.{name}_speed").rows()
        print_table(results[name])
    if json_file:
        json_file.write_text(json.dumps(results, indent=2) + "\n")
