"""How fast virtual clients are trained: whole cohorts in one computation, against one client after the other.

    python -m scripts.benchmarks.cohort --json cohort.json

The work is that of DESIGN's table: 1000 clients of 60 examples of MNIST's shape, 100 of them a round, batches of 10, one
epoch, learning rate 0.1, updates clipped and added up. Everything that is compared runs in turns, so that a busy
machine slows all of it alike; times are medians of rounds. pfl-research is compared where it can be imported.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from discreet.privacy.noise import secure_source
from discreet.tasks.examples import Examples, Task
from discreet.tasks.models import build_model, flatten_parameters, load_parameters
from discreet.wire import Order
from simulation.cohort import BatchedExchange
from simulation.engine import Engine, engine_of
from simulation.views import SampledViews
from strategies.round import ClientUpdate, ServerState, UpdateRows, _add_up, _sum_of, initial_state
from strategies.settings import round_settings
from strategies.training import Tally

Row = dict[str, Any]
Rounds = Callable[[Sequence[int]], None]

MODELS = ("logistic_regression", "mlp", "cnn")
EXAMPLES, PER_CLIENT, SEED = 60_000, 60, 20731
WORK = ["data.num_clients=1000", "training.epochs=1", "training.batch_size=10", "training.learning_rate=0.1", "sampling.probability=0.1",
        "privacy.delta=1e-9", "privacy.user.noise_multiplier=1.0"]  # fmt: skip


def digits_like(count: int = EXAMPLES) -> Task:
    """Random images of MNIST's shape: what they show does not change how long training takes."""
    generator = torch.Generator().manual_seed(SEED)
    inputs, targets = torch.rand(count, 1, 28, 28, generator=generator), torch.arange(count) % 10
    return Task("digits-like", Examples(inputs, targets), Examples(inputs[:10], targets[:10]), 10, (1, 28, 28))


def rows(*, repetitions: int = 7, cohort: int = 100, task: Task | None = None) -> list[Row]:
    """Clients a second for each model and way, and the ratio to one client after the other."""
    task = task or digits_like()
    return [row for name in MODELS for row in _compared(name, task, repetitions=repetitions, cohort=cohort)]


def _compared(name: str, task: Task, *, repetitions: int, cohort: int) -> list[Row]:
    run = load_config([*WORK, f"model.name={name}"])
    ways = {
        "plain loop of PyTorch": _plain_loop(run, task),
        "one by one": _one_by_one(run, task),
        "batched, float sums": _batched(_with_noise(run, "float"), task),
        "batched, exact sums": _batched(_with_noise(run, "grid"), task),
    }
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for repetition in range(repetitions + 1):
        for way, rounds in ways.items():
            few = cohort if way.startswith("batched") else max(1, cohort // 10)
            clients = [(repetition * cohort + number) % run.data.num_clients for number in range(few)]
            started, worked = time.perf_counter(), time.process_time()
            rounds(clients)
            times[way].append(((time.perf_counter() - started) / few, (time.process_time() - worked) / few))
    speeds = {way: [1 / median(kind) for kind in zip(*values[1:], strict=True)] for way, values in times.items()}
    base = speeds["one by one"]
    return [
        {"model": name, "way": way, "clients_per_second": wall, "clients_per_core_second": core,
         "ratio": wall / base[0], "ratio_per_core": core / base[1]}
        for way, (wall, core) in speeds.items()
    ]


def _with_noise(run: RunConfig, noise: str) -> RunConfig:
    return replace(run, privacy=replace(run.privacy, noise=noise))


def _views(run: RunConfig, task: Task) -> SampledViews:
    return SampledViews(run.data.num_clients, len(task.train), min(PER_CLIENT, len(task.train)), SEED)


def _plain_loop(run: RunConfig, task: Task) -> Rounds:
    """What a person would write without any library: SGD on each client, its update clipped and added."""
    model = build_model(run.model.name, task.input_shape, task.num_classes, seed=SEED)
    start, views = flatten_parameters(model), _views(run, task)

    def rounds(clients: Sequence[int]) -> None:
        total = torch.zeros_like(start)
        for client in clients:
            load_parameters(model, start)
            optimizer = torch.optim.SGD(model.parameters(), lr=run.training.learning_rate)
            order = torch.from_numpy(np.random.default_rng(client).permutation(views.examples(client)))
            for batch in order.split(run.training.batch_size):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(task.train.inputs[batch]), task.train.targets[batch])
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            update = flatten_parameters(model) - start
            total += update * (0.1 / update.norm()).clamp(max=1)

    return rounds


def _one_by_one(run: RunConfig, task: Task) -> Rounds:
    model = build_model(run.model.name, task.input_shape, task.num_classes, seed=SEED)
    start, views, text = flatten_parameters(model), _views(run, task), config_to_json(run)

    def rounds(clients: Sequence[int]) -> None:
        state = _state(start)
        updates = []
        for client in clients:
            examples = task.train.subset(torch.from_numpy(views.examples(client)))
            trained = DPClient(model, examples, None, ClientPolicy(), secure_source())
            reply = trained.answer(Order(1, state.clip_norm, text), start)
            updates.append(ClientUpdate(reply.update, reply.below))
        _finish(run, state, updates)

    return rounds


def _batched(run: RunConfig, task: Task) -> Rounds:
    engine = engine_of(run, task, views=_views(run, task))
    model = build_model(run.model.name, task.input_shape, task.num_classes, seed=SEED)
    start, exchange = flatten_parameters(model), BatchedExchange(run, engine, accounts=None)

    def rounds(clients: Sequence[int]) -> None:
        state = _state(start)
        replies = exchange.ask(round_number=1, params=start, clip_norm=state.clip_norm, cohort=clients)
        _finish(run, state, Tally().accept(replies))

    return rounds


def _state(start: Tensor) -> ServerState:
    return initial_state(start, clip_norm=0.1)


def _finish(run: RunConfig, state: ServerState, updates: Any) -> None:
    _add_up(updates, _sum_of(state, round_settings(run).user))


def main() -> None:
    """Measures and prints."""
    torch.set_num_threads(1)
    for row in rows():
        print(" ".join(f"{v:.3g}" if isinstance(v,float) else str(v) for v in row.values()), flush=True)


if __name__ == "__main__":
    main()
