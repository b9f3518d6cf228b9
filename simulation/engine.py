"""What a simulation trains with: the resident data set, who holds what, the stacked models, and how much at once."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from discreet.config import RunConfig
from discreet.tasks.examples import Examples, Task
from discreet.tasks.models import build_model
from discreet.tasks.partition import Partition, task_partition
from simulation.stacked_models import Stack, stack_of
from simulation.views import PartitionViews, Views

# What the clients of a chunk may fill: more, and it no longer fits the cache (a GPU's memory takes far more, and needs
# far more to be kept busy). Measured: scripts/benchmarks/cohort.py.
CHUNK_BYTES = {"cpu": 6 * 2**20, "cuda": 2**30}
LARGEST_CHUNK = {"cpu": 32, "cuda": 1024}


@dataclass(frozen=True, eq=False)
class Engine:
    """What trains virtual clients.

    Attributes:
        data: the resident data set, on the device that computes.
        views: which rows of it each client holds.
        stack: many models of the run's architecture.
        chunk: how many clients are trained together at most.
        workers: how many chunks are trained at the same time, each by a thread.
    """

    data: Examples
    views: Views
    stack: Stack
    chunk: int
    workers: int

    def __post_init__(self) -> None:
        if self.chunk < 1 or self.workers < 1:
            raise ValueError(f"chunk and workers must be at least 1, not {self.chunk} and {self.workers}")


def engine_of(run: RunConfig, task: Task, *, views: Views | None = None) -> Engine:
    """The engine for a run on a task; `views` in place of the run's own partition.

    `device` of the run decides where it computes: a chunk for every core, or one at a time on a GPU.
    """
    device = torch.device(run.device)
    model = build_model(run.model.name, task.input_shape, task.num_classes, seed=0).to(device)
    data = Examples(task.train.inputs.to(device), task.train.targets.to(device))
    if views is None:
        shares = Partition(run.data.num_clients, run.data.partition, run.data.partition_seed, run.data.alpha)
        views = PartitionViews(task_partition(task, shares))
    example = data.inputs[:1]
    return Engine(
        data,
        views,
        stack_of(model, task.input_shape),
        chunk=chunk_size(model, example, batch_size=run.training.batch_size),
        workers=len(os.sched_getaffinity(0)) if device.type == "cpu" else 1,
    )


def chunk_size(model: nn.Module, example: Tensor, *, batch_size: int) -> int:
    """How many clients to train together: parameters, their change, and what a batch leaves for the backward pass.

    Args:
        model: on the device that computes.
        example: one input, (1, *input_shape).
        batch_size: examples of each client at a time.
    """
    kept = 0

    def count(values: Tensor) -> Tensor:
        nonlocal kept
        kept += values.numel()
        return values

    with torch.autograd.graph.saved_tensors_hooks(count, lambda values: values):
        model(example)
    floats = 2 * sum(parameter.numel() for parameter in model.parameters()) + batch_size * (kept + example.numel())
    kind = example.device.type
    return max(1, min(LARGEST_CHUNK[kind], CHUNK_BYTES[kind] // (4 * floats)))
