"""Where the time of a cohort goes, beside what the machine can do: `discreet benchmark profile`.

The work is that of `benchmarks.cohort_speed`, in one thread, so that shares add up. Limits are measured in the same
run: the rate of large matrix products and of copies that are larger than every cache, both in one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cohort_speed import CLIENTS, CLIP_NORM, COHORT, MODELS, SEED, WORK, digits_like
from discreet.client.admission import local_settings
from discreet.client_settings import DataConfig
from discreet.config import load_config
from discreet.privacy.clipped_sum import ClippedSum
from discreet.privacy.randomness import secure_source
from discreet.settings import client_settings
from discreet.simulation.batches import table_of
from discreet.simulation.chunk import Chunk
from discreet.simulation.client_examples import PartitionedExamples
from discreet.simulation.cohort import chunk_updates
from discreet.simulation.draws import SecureDraws
from discreet.simulation.engine import engine_of
from discreet.tasks.models import build_model, flatten_parameters
from discreet.tasks.partition import partition_indices

Row = dict[str, Any]

SIDE = 1024  # of the matrices whose products are timed
COPIED = 2**26  # floats
GROUPS = {
    "products": ("mm", "bmm", "baddbmm", "baddbmm_", "addmm"),
    "reading examples": ("index_select",),
}


def rows(*, repetitions: int = 5, models: tuple[str, ...] = MODELS) -> list[Row]:
    """The machine's limits, then a row a model: clients a second, the rate of its products, and shares of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        product, copied = product_rate(), copy_rate()
        limits = {"what": "this machine, one thread", "gflop_per_second": product, "gb_per_second": copied}
        return [limits, *(_profiled(name, repetitions, product) for name in models)]
    finally:
        torch.set_num_threads(threads)


def product_rate() -> float:
    """Billions of operations a second of a float32 product of two large matrices: the best of ten."""
    first, second = torch.rand(SIDE, SIDE), torch.rand(SIDE, SIDE)
    return 2e-9 * SIDE**3 / min(_timed(lambda: torch.mm(first, second)) for _ in range(10))


def copy_rate() -> float:
    """Gigabytes a second that a large copy reads and writes: the best of ten."""
    first, second = torch.rand(COPIED), torch.empty(COPIED)
    return 8e-9 * COPIED / min(_timed(lambda: second.copy_(first)) for _ in range(10))


def _timed(call: Callable[[], Tensor]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def operations_an_example(name: str) -> int:
    """Floating-point operations of the products in a forward and a backward pass on one example."""
    model = build_model(name, (1, 28, 28), 10, seed=SEED)
    counter = FlopCounterMode(display=False)
    with counter:
        loss = functional.cross_entropy(model(torch.rand(1, 1, 28, 28)), torch.tensor([3]))
        loss.backward()  # type: ignore[no-untyped-call]
    return counter.get_total_flops()


def _profiled(name: str, repetitions: int, limit: float) -> Row:
    train, examples = _cohort(name)
    train()
    seconds = median(_timed(train) for _ in range(repetitions))
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        train()
    rate = 1e-9 * operations_an_example(name) * examples / seconds
    found: Row = {"what": name, "clients_per_second": COHORT / seconds, "gflop_per_second": rate}
    return found | {"share_of_product_rate": rate / limit} | _shares(profiled)


def _cohort(name: str) -> tuple[Callable[[], Tensor], int]:
    """Trains a cohort in this thread, which the profiler sees, and adds it up; and how many examples that are."""
    run, task = load_config([*WORK, f"model.name={name}"]), digits_like()
    held = PartitionedExamples(
        partition_indices(task.train.targets, DataConfig(num_clients=CLIENTS, partition_seed=SEED))
    )
    start = flatten_parameters(build_model(name, task.input_shape, task.num_classes, seed=SEED))
    engine, draws = engine_of(run, task, client_examples=held), SecureDraws(secure_source())
    settings = local_settings(client_settings(run), len(task.train) // CLIENTS)

    def train() -> Tensor:
        total = ClippedSum(len(start), CLIP_NORM)
        for first in range(0, COHORT, engine.chunk):
            some = [held.examples(client) for client in range(first, min(first + engine.chunk, COHORT))]
            table = table_of(sorted(some, key=len, reverse=True))
            chunk = Chunk(engine.model, engine.data, table, [settings] * len(some), draws)
            total.add(chunk_updates(chunk, start))
        return start

    return train, int(held.sizes(np.arange(COHORT)).sum())


def _shares(profiled: profile) -> Row:
    """Shares of the operations' own time, which is all of it but Python's."""
    own = {event.key.removeprefix("aten::"): event.self_cpu_time_total for event in profiled.key_averages()}
    total = sum(own.values())
    shares: Row = {group: sum(own.pop(name, 0.0) for name in names) / total for group, names in GROUPS.items()}
    largest = sorted(own, key=lambda name: -own[name])[:4]
    return shares | {"next": ", ".join(f"{name} {own[name] / total:.0%}" for name in largest)}
