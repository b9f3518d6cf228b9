"""Measures things side by side in one run, and prints a table for each section; without a SECTION,
all of them.

sections:
  per_example   clipped per-example gradients against plain ones, and whole steps against Opacus
  loop          a step of DPSGD against the plain step and Opacus, for models as people write them
  zoo           the same for image models of timm: some that were once slow, others drawn at random
  cohort        virtual clients per second, batched and sequential, beside pfl-research
  cohort_scale  time and memory against cohort and population, up to a million virtual clients
  ray           chunks as tasks of a Ray cluster against forked workers: rounds and whole runs
  load          4 to 40 nodes that do nothing, 0.1 to 5 million parameters: the server's cost of a
                round
  secure_round  20 SuperNodes, a million parameters: a round under secure aggregation against one in
                the clear
  device        a GPU, only where it is named: sums, steps, cohorts, noise and a resumed run within
                --minutes

examples:
  discreet benchmark
  discreet benchmark per_example cohort --json measured.json
  discreet benchmark device --device cuda --json gpu.json
  discreet benchmark device --device cpu --small
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
from discreet.run_files.places import own_files
from discreet.run_files.whole_files import replace_file
from discreet.settings.rules import ConfigError

SECTIONS = (
    "per_example",
    "loop",
    "zoo",
    "cohort",
    "cohort_scale",
    "ray",
    "load",
    "secure_round",
)


def command(
    sections: Annotated[list[str] | None, typer.Argument(metavar="SECTION ...")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="also write the rows to this file")
    ] = None,
    device: Annotated[
        str, typer.Option(help="of the section device: cuda, cuda:1 or cpu")
    ] = "cuda",
    small: Annotated[
        bool, typer.Option("--small", help="of the section device: small models and batches")
    ] = False,
    minutes: Annotated[
        float, typer.Option(min=0.1, help="of the section device: the time it may take")
    ] = 8.0,
) -> None:
    """Measures, prints, and writes the rows of each section."""
    if unknown := [name for name in sections or () if name not in (*SECTIONS, "device")]:
        raise ConfigError(f"no section {unknown[0]}; known are {', '.join(SECTIONS)}, device")
    sys.path.append(str(own_files()))  # in a wheel, benchmarks/ is there
    if "device" in (sections or ()):
        if sections != ["device"]:
            raise ConfigError("the section device is measured alone: discreet benchmark device")
        _measure_device(device, small=small, minutes=minutes, json_file=json_file)
        return
    machine = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "load": os.getloadavg(),
    }
    results: dict[str, Any] = {"machine": machine}
    print(json.dumps(results["machine"]))
    for name in sections or SECTIONS:
        print(name)
        results[name] = import_module(f"benchmarks.{name}_speed").rows()
        print_table(results[name])
    if json_file:
        replace_file(json_file, (json.dumps(results, indent=2) + "\n").encode())


def _measure_device(device: str, *, small: bool, minutes: float, json_file: Path | None) -> None:
    if device.split(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"--device must be cuda, cuda:N or cpu (got {device})")
    if device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(
            f"--device {device} needs a GPU that PyTorch can use: --device cpu tries the command "
            "without one"
        )
    import_module("benchmarks.device_speed").measure(
        device, small=small, minutes=minutes, json_file=json_file
    )
