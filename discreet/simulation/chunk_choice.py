"""How the clients of a run are trained: together or one after the other, and how many in a chunk.
It follows from the model and the form of the data, and from no client's example."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from discreet.models.models import MISTAKES, flatten_parameters, to_train
from discreet.per_example.objective import trainable
from discreet.per_example.trial import made_up
from discreet.privacy.randomness import seeded_source
from discreet.settings.training import TaskConfig
from discreet.simulation.chunk import Chunk, SeededDraws, SharedExamples, table_of
from discreet.simulation.mapped_model import MappedModel
from discreet.training.local_training import ExamplePrivacy, LocalSettings

# Memory of a chunk's clients. More no longer fits the cache; a GPU takes far more, and needs it to
# be busy. Measured by benchmarks/cohort_speed.py.
CHUNK_BYTES = {"cpu": 8 * 2**20, "cuda": 2**30}
LARGEST_CHUNK = {"cpu": 64, "cuda": 1024}
# least number of clients of a mapped model that must fit; with fewer, mapping is not faster
FEW = 4
FEW_BUILT = 2
# the numbers of examples of the clients in the trial, and the tolerance of the comparison
_TRIED = (7, 4)
_AGREEMENT = 1e-3


def made_up_examples(model: nn.Module, data: SharedExamples) -> SharedExamples:
    """A few examples of the form of the data, with targets 0 and 1, as every kind of target has."""
    count = max(_TRIED)
    first = torch.zeros(1, dtype=torch.int64, device=data.device)
    inputs = made_up(model, data.read(first), count)
    targets = torch.zeros_like(data.targets[:1]).repeat_interleave(count, dim=0)
    targets[1::2] += 1
    return SharedExamples(inputs, targets)


def tried_together(
    layers: MappedModel,
    data: SharedExamples,
    task: TaskConfig,
    *,
    by_example: bool,
    room: int,
) -> MappedModel:
    """The model with `together` set by a trial; False if too few clients fit the cache, which has
    room for `room`."""
    if by_example:
        few = FEW_BUILT
    else:
        few = FEW
    together = layers.together and room >= few
    if together:
        together = trains_together(layers, data, task, by_example=by_example)
    return replace(layers, together=together)


def trains_together(
    model: MappedModel, data: SharedExamples, task: TaskConfig, *, by_example: bool
) -> bool:
    """True if clients that are trained together get the same results as alone, with the same
    dropout masks."""
    settings = LocalSettings(
        1, 3, 0.01, 0.0, ExamplePrivacy(1.0, 0.1) if by_example else None, task
    )
    table = table_of([np.arange(size) % len(data) for size in _TRIED])
    found = []
    for together in (True, False):
        draws = SeededDraws([seeded_source(size) for size in _TRIED])
        chunk = Chunk(
            replace(model, together=together), data, table, [settings] * len(_TRIED), draws
        )
        try:
            found.append(chunk.updates(flatten_parameters(model.model)))
        except MISTAKES:  # vmap can't follow the forward
            return False
    return bool(((found[0] - found[1]).norm(dim=1) <= _AGREEMENT * found[1].norm(dim=1)).all())


def client_floats(
    model: nn.Module, example: Tensor, *, batch_size: int, dual: int = 0, built: bool = False
) -> int:
    """The number of floats in the working set of a client's training: its parameters, their change,
    and the values that a batch saves for the backward pass.

    Args:
      model: on the device of `example`.
      example: one input, (1, ...).
      batch_size: the examples of a client's batch.
      dual: the examples of a client if its first layer is trained in the dual form, else 0.
      built: True if the gradient of each example is built.
    """
    kept = 0
    weights = {parameter.data_ptr() for parameter in model.parameters()}

    def count(values: Tensor) -> Tensor:
        nonlocal kept
        if values.data_ptr() in weights:
            kept += 0
        else:
            kept += values.numel()
        return values

    model.eval()  # draws nothing
    with torch.autograd.graph.saved_tensors_hooks(count, lambda values: values):
        model(example)
    to_train(model)
    sizes = [parameter.numel() for parameter in trainable(model)]
    if dual:
        sizes[0] = dual * (dual + 2 * len(trainable(model)[0]))
    return (2 + batch_size * built) * sum(sizes) + batch_size * (kept + example.numel())


def chunk_size(floats: int, kind: str = "cpu") -> int:
    """The number of clients, with `floats` floats each, to train together so that they fit the
    cache of a kind of device."""
    fitting = CHUNK_BYTES[kind] // (4 * floats)
    # A model that does not fit the cache anyway still gains by fewer and larger calls.
    return max(
        1, min(LARGEST_CHUNK[kind], max(fitting, min(FEW, 16 * CHUNK_BYTES[kind] // (4 * floats))))
    )
