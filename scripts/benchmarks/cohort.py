"""How fast virtual clients are trained: whole cohorts in one computation, against one client after the other.

    python -m scripts.benchmarks.cohort --json cohort.json

The work: 1000 clients of 60 examples of MNIST's shape, 100 of them a round, batches of 10, one epoch, learning rate 0.1,
every update clipped and added up. Everything that is compared runs in turns, in one process, so that a busy machine
slows all of it alike. Times are medians of rounds: by the clock, and by the work of all cores together, which other
programs disturb less. pfl-research is compared where it is installed, and skipped by name where it is not.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from client_app.client import DPClient
from client_app.policy import ClientPolicy
from discreet.config import RunConfig, config_to_json, load_config
from discreet.privacy.clipped_sum import ClippedSum, GridSum
from discreet.privacy.grid import grid_for
from discreet.privacy.noise import secure_source
from discreet.tasks.examples import Examples, Task
from discreet.tasks.models import build_model, flatten_parameters, load_parameters
from discreet.tasks.partition import partition_indices
from discreet.wire import Order
from scripts.benchmarks.pfl_rounds import pfl_rounds
from simulation.cohort import BatchedExchange
from simulation.engine import engine_of
from simulation.views import PartitionViews, Views
from strategies.exchange import Replies

Row = dict[str, Any]
Rounds = Callable[[Sequence[int]], None]

MODELS = ("logistic_regression", "mlp", "cnn")
EXAMPLES, CLIENTS, COHORT, SEED, CLIP_NORM = 60_000, 1000, 100, 20731, 0.1
WORK = (
    "training.epochs=1",
    "training.batch_size=10",
    "training.learning_rate=0.1",
    "training.momentum=0",
    "privacy.delta=1e-9",
    "privacy.user.noise_multiplier=1.0",
)
DP_SGD = ("privacy.example.enabled=true", "privacy.example.noise_multiplier=1.0")


def digits_like(count: int = EXAMPLES) -> Task:
    """Random images of MNIST's shape: what they show does not change how long training takes."""
    generator = torch.Generator().manual_seed(SEED)
    inputs, targets = torch.rand(count, 1, 28, 28, generator=generator), torch.arange(count) % 10
    return Task("digits-like", Examples(inputs, targets), Examples(inputs[:10], targets[:10]), 10, (1, 28, 28))


def rows(
    *, models: Sequence[str] = MODELS, examples: int = EXAMPLES, clients: int = CLIENTS, repetitions: int = 7
) -> list[Row]:
    """Clients a second for each model and way, by the clock and for each core's second, and ratios to one by one."""
    task = digits_like(examples)
    parts = partition_indices(task.train.targets, clients, kind="iid", seed=SEED)
    found = []
    for name in models:
        for ways in (_sgd_ways, _dp_sgd_ways):
            found += _compared(name, ways(name, task, PartitionViews(parts)), clients, repetitions)
    return found


def _sgd_ways(name: str, task: Task, views: Views) -> dict[str, Rounds]:
    run = load_config([*WORK, f"model.name={name}"])
    ways = {
        "plain loop of PyTorch": _plain_loop(run, task, views),
        "one by one": _one_by_one(run, task, views),
        "batched": _batched(run, task, views),
        "batched, sums on the grid": _batched(run, task, views, on_grid=True),
    }
    if importlib.util.find_spec("pfl"):
        model = build_model(name, task.input_shape, task.num_classes, seed=SEED)
        training = {"learning_rate": run.training.learning_rate, "batch_size": run.training.batch_size}
        ways["pfl-research"] = pfl_rounds(model, task, views, norm_clip=CLIP_NORM, **training)
    return ways


def _dp_sgd_ways(name: str, task: Task, views: Views) -> dict[str, Rounds]:
    run = load_config([*WORK, *DP_SGD, f"model.name={name}"])
    free = replace(run, privacy=replace(run.privacy, example=replace(run.privacy.example, enabled=False)))
    return {"DP-SGD, one by one": _one_by_one(run, task, views, free), "DP-SGD, batched": _batched(run, task, views)}


def _compared(name: str, ways: dict[str, Rounds], clients: int, repetitions: int) -> list[Row]:
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    cohort = min(COHORT, clients)
    for repetition in range(repetitions + 1):
        for way, rounds in ways.items():
            few = cohort if "batched" in way else max(1, cohort // 10)
            chosen = [(repetition * cohort + number) % clients for number in range(few)]
            started, worked = time.perf_counter(), time.process_time()
            rounds(chosen)
            times[way].append(((time.perf_counter() - started) / few, (time.process_time() - worked) / few))
    # The first repetition warms up.
    speeds = {way: [1 / median(kind) for kind in zip(*values[1:], strict=True)] for way, values in times.items()}
    base = next(speed for way, speed in speeds.items() if "one by one" in way)
    return [
        {
            "model": name,
            "way": way,
            "clients_per_second": wall,
            "clients_per_core_second": core,
            "ratio": wall / base[0],
            "ratio_per_core": core / base[1],
        }
        for way, (wall, core) in speeds.items()
    ]
