"""What a simulation trains with: the resident data set, who holds what, the stacked models, and how much at once."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from discreet.config import RunConfig
from discreet.tasks.examples import Task
from discreet.tasks.models import build_model
from discreet.tasks.scattering import features_of, split_fixed
from discreet.training.local_training import LocalSettings
from simulation.resident import Resident, resident
from simulation.span import spans
from simulation.stacked_models import Stack, stack_of
from simulation.views import Views, views_of

logger = logging.getLogger("discreet")

# What the clients of a chunk may fill: more, and it no longer fits the cache (a GPU's memory takes far more, and needs
# far more to be kept busy). Measured: benchmarks/cohort_speed.py.
CHUNK_BYTES = {"cpu": 8 * 2**20, "cuda": 2**30}
LARGEST_CHUNK = {"cpu": 64, "cuda": 1024}
FEW = 4


@dataclass(frozen=True, eq=False)
class Engine:
    """What trains virtual clients.

    Attributes:
        data: the resident data set, on the device that computes.
        views: which rows of it each client holds.
        stack: many models of the run's architecture.
        chunk: how many clients are trained together at most.
        workers: how many chunks are trained at the same time, each in a process of its own.
    """

    data: Resident
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

    Raises:
        ValueError: a layer of the model has no pass by hand.
    """
    device = torch.device(run.device)
    model = build_model(run.model.name, task.input_shape, task.num_classes, seed=0).to(device)
    fixed, learned = split_fixed(model)
    if fixed is None:
        data = resident(task.train, device)
    else:
        logger.info("the fixed features of %d examples are computed once", len(task.train))
        data = resident(features_of(fixed, task.train), device)
    if views is None:
        views = views_of(task, run.data)
    stack = learned_stack(model, task.input_shape)
    if stack is None:
        raise ValueError(f"model.name: {run.model.name} can't be trained many at a time: take engine=one_by_one")
    training = run.training
    settings = LocalSettings(training.epochs, training.batch_size, training.learning_rate, training.momentum)
    # The first clients stand for all: a chunk that is a little too large or too small still gives the same numbers.
    examples = int(views.sizes(np.arange(min(len(views), 100))).max(initial=0))
    in_span = not run.privacy.example.enabled and spans(stack, examples, settings)
    return Engine(
        data,
        views,
        stack,
        chunk=chunk_size(
            learned,
            data.read(torch.zeros(1, dtype=torch.int64, device=device)),
            batch_size=training.batch_size,
            spanned=examples if in_span else 0,
        ),
        workers=len(os.sched_getaffinity(0)) if device.type == "cpu" else 1,
    )


def learned_stack(model: nn.Module, input_shape: tuple[int, ...]) -> Stack | None:
    """The stack of what learns in a model; None where a layer has no pass by hand."""
    fixed, learned = split_fixed(model)
    return stack_of(learned, input_shape if fixed is None else (fixed.out_features,))


def chunk_size(model: nn.Module, example: Tensor, *, batch_size: int, spanned: int = 0) -> int:
    """How many clients to train together: what they read and write again and again is to stay in the cache.

    That is their parameters, the change of these, and what a batch leaves for the backward pass.

    Args:
        model: on the device that computes.
        example: one input, (1, *input_shape).
        batch_size: examples of each client at a time.
        spanned: where the first weight is trained in the span (`simulation.span`), the examples of a client; else 0.
    """
    kept = 0

    weights = {parameter.data_ptr() for parameter in model.parameters()}

    def count(values: Tensor) -> Tensor:
        nonlocal kept
        kept += 0 if values.data_ptr() in weights else values.numel()
        return values

    with torch.autograd.graph.saved_tensors_hooks(count, lambda values: values):
        model(example)
    sizes = [parameter.numel() for parameter in model.parameters()]
    if spanned:
        first = next(model.parameters())
        sizes[0] = spanned * (spanned + 2 * len(first))
    floats = 2 * sum(sizes) + batch_size * (kept + example.numel())
    kind = example.device.type
    fitting = CHUNK_BYTES[kind] // (4 * floats)
    # A model for which the cache is too small anyway still gains by fewer and larger calls.
    return max(1, min(LARGEST_CHUNK[kind], max(fitting, min(FEW, 16 * CHUNK_BYTES[kind] // (4 * floats)))))
