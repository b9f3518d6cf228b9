"""All that a simulation trains with: the shared data set, who holds what, the model, and how much at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from discreet.data.examples import Task
from discreet.data.partition import ClientExamples, client_examples_of
from discreet.mechanisms.client_noise import OwnNoise
from discreet.mechanisms.mechanism_table import own_noise
from discreet.models.fixed_part import behind_fixed
from discreet.models.models import (
    MISTAKES,
    flatten_parameters,
    load_parameters,
    model_for,
    outputs_of,
    to_train,
    trainable,
)
from discreet.privacy.randomness import RandomSource, seeded_source
from discreet.queries.query import EVALUATION, Query, query_of
from discreet.server.plan import Plan
from discreet.settings.privacy import EXAMPLE
from discreet.settings.training import TaskConfig
from discreet.simulation.chunk import Chunk, SeededDraws, chunk_updates
from discreet.simulation.client_examples import SharedExamples, TrainedExamples, shared_examples, table_of, trained_on
from discreet.simulation.layer_sequence import LayerSequence, sequence_of
from discreet.simulation.mapped_model import MappedModel, mapped_model
from discreet.training.local_training import ExamplePrivacy, LocalSettings, settings_without_noise

# What the clients of a chunk may fill: more, and it no longer fits the cache (a GPU's memory takes far more, and needs
# far more to be kept busy). Measured: benchmarks/cohort_speed.py.
CHUNK_BYTES = {"cpu": 8 * 2**20, "cuda": 2**30}
LARGEST_CHUNK = {"cpu": 64, "cuda": 1024}
FEW, FEW_BUILT = 4, 2  # clients of a mapped model that must fit, or it gains nothing by being mapped
_TRIED, _AGREEMENT = (7, 4), 1e-3  # the examples of clients on which it is tried, and how near they must come


@dataclass(frozen=True, eq=False)
class Rating:
    """A query that clients answer by what they hold out.

    Attributes:
        model: its part that learns.
        noise: of each client on its own answer; None if the server noises their sum.
    """

    query: Query
    model: nn.Module
    noise: OwnNoise | None = None


@dataclass(frozen=True, eq=False)
class Engine:
    """Trains virtual clients.

    Attributes:
        data: the data set that all clients share, on the device that computes.
        client_examples: the rows of it that each client holds.
        model: its layers, for many clients at once.
        chunk: the number of clients that are trained together at most.
        workers: the number of chunks that are trained at the same time, each in a process of its own.
        rates: the query of the run; None if it asks none.
    """

    data: SharedExamples
    client_examples: ClientExamples | TrainedExamples
    model: LayerSequence | MappedModel
    chunk: int
    workers: int
    rates: Rating | None = None

    def on(self, device: torch.device) -> Engine:
        """The same, with its data and its models there. A chunk stays as large as it is."""
        if device == self.data.device:
            return self
        if isinstance(self.model, MappedModel):
            self.model.model.to(device)
        if self.rates is not None:
            self.rates.model.to(device)
        return replace(self, data=SharedExamples(self.data.inputs.to(device), self.data.targets.to(device)))

    def answers(self, clients: Sequence[int], params: Tensor, sources: Sequence[RandomSource]) -> Tensor:
        """The answers of clients (k,), each with its source of randomness, on parameters (num_params,): (k, length), or
        (k, length + 1) if they noise them; float32. One computation for all."""
        rates = self.rates
        assert rates is not None
        assert isinstance(self.client_examples, TrainedExamples)
        held = [self.client_examples.held_out(client) for client in clients]
        rows = torch.from_numpy(np.concatenate(held)).to(self.data.device)
        load_parameters(rates.model, params)
        outputs = outputs_of(rates.model, self.data.read(rows))
        targets, sizes = self.data.targets[rows].cpu(), [len(numbers) for numbers in held]
        pairs = zip(torch.split(outputs, sizes), torch.split(targets, sizes), strict=True)
        answers = [rates.query.answer(*pair) for pair in pairs]
        if rates.noise is not None:
            drawn = zip(answers, sizes, sources, strict=True)
            answers = [rates.noise.noised(answer, size, source) for answer, size, source in drawn]
        return torch.stack(answers).to(torch.float32)


def engine_of(plan: Plan, task: Task, *, dealt: ClientExamples | None = None) -> Engine:
    """The engine for a run on a task; `dealt` in place of the run's own partition.

    `device` of the run decides where it computes: a chunk for every core, or one at a time on a GPU.
    """
    run, device = plan.run, torch.device(plan.device)
    model = model_for(plan.model, task.shape, seed=0).to(device)
    learned, examples_read = behind_fixed(model, task.train)
    data = shared_examples(examples_read, device)
    client_examples, rates = trained_on(dealt or client_examples_of(task, run.data), run.evaluation), None
    if run.evaluation.private:
        query = query_of(EVALUATION, run, task.shape)
        rates = Rating(query, learned, own_noise(run, query.l1_norm))
    local, by_example = settings_without_noise(run.training, run.task), EXAMPLE in plan.mechanisms
    by_hand = sequence_of(learned, data.inputs.shape[1:], loss=local.loss)
    layers = by_hand or mapped_model(learned, local.loss, by_example=by_example)
    floats = client_floats(
        learned,
        data.read(torch.zeros(1, dtype=torch.int64, device=device)),
        batch_size=run.training.batch_size,
        built=by_example and isinstance(layers, MappedModel),
    )
    kind = "cuda" if plan.engine == "ray" and plan.ray.num_gpus else device.type
    engine = Engine(data, client_examples, layers, chunk_size(floats, kind), 1, rates)
    if isinstance(layers, MappedModel):
        fits = CHUNK_BYTES[kind] // (4 * floats) >= (FEW_BUILT if by_example else FEW)
        together = fits and layers.together and trains_together(layers, data, run.task, by_example=by_example)
        engine = replace(engine, model=replace(layers, together=together))
        engine = engine if together else engine.on(torch.device("cpu"))
    return replace(engine, workers=len(os.sched_getaffinity(0))) if engine.data.device.type == "cpu" else engine


def trains_together(model: MappedModel, data: SharedExamples, task: TaskConfig, *, by_example: bool) -> bool:
    """True if clients who are trained together come to what each comes to alone, with its masks of dropout."""
    settings = LocalSettings(1, 3, 0.01, 0.0, ExamplePrivacy(1.0, 0.1) if by_example else None, task)
    table, found = table_of([np.arange(size) % len(data) for size in _TRIED]), []
    for together in (True, False):
        draws = SeededDraws([seeded_source(size) for size in _TRIED])
        chunk = Chunk(replace(model, together=together), data, table, [settings] * len(_TRIED), draws)
        try:
            found.append(chunk_updates(chunk, flatten_parameters(model.model)))
        except MISTAKES:  # vmap can't follow the forward
            return False
    return bool(((found[0] - found[1]).norm(dim=1) <= _AGREEMENT * found[1].norm(dim=1)).all())


def client_floats(model: nn.Module, example: Tensor, *, batch_size: int, built: bool = False) -> int:
    """The number of floats that training a client reads and writes again and again: its parameters, the change of
    these, and what a batch leaves for the backward pass.

    Args:
        model: on the device of `example`.
        example: one input, (1, *input_shape).
        batch_size: examples of each client at a time.
        built: the gradient of each example is built.
    """
    kept = 0
    weights = {parameter.data_ptr() for parameter in model.parameters()}

    def count(values: Tensor) -> Tensor:
        nonlocal kept
        kept += 0 if values.data_ptr() in weights else values.numel()
        return values

    model.eval()  # draws nothing
    with torch.autograd.graph.saved_tensors_hooks(count, lambda values: values):
        model(example)
    to_train(model)
    size = sum(parameter.numel() for parameter in trainable(model))
    return (2 + batch_size * built) * size + batch_size * (kept + example.numel())


def chunk_size(floats: int, kind: str = "cpu") -> int:
    """The number of clients with so many floats to train together on a kind of device, so that they fit its cache."""
    fitting = CHUNK_BYTES[kind] // (4 * floats)
    # A model for which the cache is too small anyway still gains by fewer and larger calls.
    return max(1, min(LARGEST_CHUNK[kind], max(fitting, min(FEW, 16 * CHUNK_BYTES[kind] // (4 * floats)))))
