"""Clients that are trained together: draws, gradients and noise of all at once, for `discreet.training.local_training`.

With a seed every client draws from the streams that it would draw from by itself. Without one, one secure stream serves
all of them in bulk: a draw for each would halve the speed of logistic regression.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from discreet.data.partition import Numbers
from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.randomness import RandomSource
from discreet.privacy.sampling import poisson_sample
from discreet.simulation.client_examples import (
    HeldExamples,
    SharedExamples,
    Table,
    poisson_batch,
    read,
    shuffled_batches,
)
from discreet.simulation.layer_sequence import LayerSequence, Params
from discreet.simulation.mapped_model import MappedModel
from discreet.training.local_training import (
    LocalSettings,
    dp_sgd,
    epoch_order,
    local_update,
    sgd,
    shared_step,
    step_batch,
    step_noise,
)


@dataclass(frozen=True, eq=False)
class SeededDraws:
    """One source a client, a row each: the numbers are those that it would draw alone. Those that draw come first."""

    sources: Sequence[RandomSource]

    def permutations(self, sizes: Numbers, *, epoch: int) -> Numbers:
        """A random order of each client's examples, (k, largest size), 0 beyond a client's size."""
        orders = np.zeros((len(sizes), max(sizes, default=0)), dtype=np.int64)
        for row, size in enumerate(sizes.tolist()):
            orders[row, :size] = epoch_order(self.sources[row], epoch, size).numpy()
        return orders

    def batches(self, sizes: Numbers, probabilities: Sequence[float], *, step: int) -> tuple[Numbers, Numbers]:
        """Poisson batches: clients and positions of the examples that are in, both (m,), ascending by client."""
        each = zip(self.sources, sizes.tolist(), probabilities, strict=False)
        found = [step_batch(source, step, size, probability=chance).numpy() for source, size, chance in each]
        return np.repeat(np.arange(len(found)), [len(positions) for positions in found]), np.concatenate(found)

    def add_noise(self, totals: Tensor, mechanisms: Sequence[Gaussian], sensitivity: float, *, step: int) -> Tensor:
        """Each row of `totals` (k, d) plus its own noise for `sensitivity`."""
        noised = torch.empty_like(totals)
        for row, mechanism in enumerate(mechanisms[: len(totals)]):
            noised[row] = mechanism.add_noise(totals[row], sensitivity, step_noise(self.sources[row], step))
        return noised

    def of(self, row: int) -> RandomSource:
        return self.sources[row]


@dataclass(frozen=True, eq=False)
class SecureDraws:
    """`SeededDraws` from one secure source. Clients of equal size, and of equal noise, are drawn for in one go."""

    source: RandomSource

    def __post_init__(self) -> None:
        if not self.source.is_secure:
            raise ValueError("source must be secure: with a seed every client draws from streams of its own")

    def permutations(self, sizes: Numbers, *, epoch: int) -> Numbers:
        """Each order is uniform: see `RandomSource.permutation`."""
        shape = len(sizes), max(sizes, default=0)
        beyond = np.arange(shape[1]) >= sizes[:, None]
        while True:
            words = self.source.words(math.prod(shape)).reshape(shape)
            words[beyond] = np.iinfo(words.dtype).max  # sorted behind all others
            orders: Numbers = np.argsort(words, axis=1)
            ranked = np.take_along_axis(words, orders, axis=1)
            # Two equal words, once in 10^15 draws: all are drawn anew, so that no order is likelier than another.
            if not ((ranked[:, 1:] == ranked[:, :-1]) & ~beyond[:, :-1]).any():
                orders[beyond] = 0
                return orders

    def batches(self, sizes: Numbers, probabilities: Sequence[float], *, step: int) -> tuple[Numbers, Numbers]:
        clients, positions = [], []
        for start, stop in pairwise([0, *(np.flatnonzero(np.diff(sizes)) + 1).tolist(), len(sizes)]):
            size = int(sizes[start])
            chosen = poisson_sample((stop - start) * size, probability=probabilities[start], source=self.source).numpy()
            clients.append(start + chosen // max(size, 1))
            positions.append(chosen % max(size, 1))
        return np.concatenate(clients), np.concatenate(positions)

    def add_noise(self, totals: Tensor, mechanisms: Sequence[Gaussian], sensitivity: float, *, step: int) -> Tensor:
        if all(mechanism == mechanisms[0] for mechanism in mechanisms[: len(totals)]):
            return mechanisms[0].add_noise(totals, sensitivity, self.source)
        pairs = zip(totals, mechanisms, strict=False)
        return torch.stack([mechanism.add_noise(row, sensitivity, self.source) for row, mechanism in pairs])

    def of(self, row: int) -> RandomSource:
        return self.source


Draws = SeededDraws | SecureDraws


@dataclass(frozen=True, eq=False)
class Chunk:
    """`SgdClients` and `DpSgdClients` by the passes of a model's layers: rows are clients, those with most examples
    first, whose `settings` differ in the noise of DP-SGD at most."""

    model: LayerSequence | MappedModel
    data: SharedExamples
    table: Table
    settings: Sequence[LocalSettings]
    draws: Draws

    def examples(self, row: int) -> HeldExamples:
        """Those of one client."""
        numbers = torch.from_numpy(self.table.numbers[row, : self.table.sizes[row]])
        return HeldExamples(self.data, numbers.to(self.data.device))

    def shuffled_batches(self, epoch: int) -> Iterator[tuple[int, Table]]:
        orders = self.draws.permutations(self.table.sizes, epoch=epoch)
        for batch in shuffled_batches(self.table, orders, batch_size=self.settings[0].batch_size):
            yield len(batch.sizes), batch

    def add_mean_gradients(self, params: Params, batch: Table, into: Params, *, keep: float, rate: float) -> None:
        self.model.accumulate(params, read(self.data, batch, mean=True), into, keep=keep, rate=rate)

    def poisson_batch(self, probabilities: Sequence[float], *, step: int) -> Table:
        active = len(probabilities)
        clients, positions = self.draws.batches(self.table.sizes[:active], probabilities, step=step)
        return poisson_batch(self.table, clients, positions, active=active)

    def clipped_sums(self, params: Params, batch: Table, clip_norm: float) -> Tensor:
        if not batch.sizes.any():
            return params[0].new_zeros(len(batch.sizes), self.model.layout.size)
        return self.model.clipped_sums(params, read(self.data, batch, mean=False), clip_norm)

    def add_noise(self, sums: Tensor, clip_norm: float, *, step: int) -> Tensor:
        return self.draws.add_noise(sums, self._mechanisms, clip_norm, step=step)

    def views(self, rows: Tensor) -> Params:
        return self.model.layout.views(rows)

    @cached_property
    def _mechanisms(self) -> list[Gaussian]:
        return [settings.example.mechanism for settings in self.settings if settings.example]


def chunk_updates(chunk: Chunk, start: Tensor) -> Tensor:
    """The change of the parameters of each client, (k, num_params), float32, not clipped: `local_update`, for many.
    `start` (num_params,) is on the device of the chunk's data."""
    start, settings, sizes = start.to(torch.float32), chunk.settings[0], chunk.table.sizes.tolist()
    if isinstance(chunk.model, MappedModel):
        if not chunk.model.together:
            model, each = chunk.model.model, enumerate(chunk.settings)
            alone = partial(local_update, model, start)
            return torch.stack([alone(chunk.examples(n), settings=how, source=chunk.draws.of(n)) for n, how in each])
        chunk = replace(chunk, model=chunk.model.drawing(map(chunk.draws.of, range(len(sizes)))))
    params = chunk.model.layout.copies(start, len(sizes))
    if settings.example:
        dp_sgd(chunk, params, sizes, settings)
    else:
        sgd(chunk, params, sizes, settings)
    return chunk.model.layout.change(params, start)


@torch.no_grad()
def chunk_steps(chunk: Chunk, start: Tensor, clip_norm: float) -> Tensor:
    """Each client's step over all its examples, (k, num_params), float64: `shared_step`, for many."""
    settings, table = chunk.settings[0], chunk.table
    if isinstance(chunk.model, MappedModel):
        step = partial(shared_step, chunk.model.model, start, settings=settings)
        rows = range(len(table.sizes))
        return torch.stack(
            [step(chunk.examples(row).subset(slice(None)), clip=(clip_norm, chunk.draws.of(row))) for row in rows]
        )
    params = [values.double() for values in chunk.model.layout.copies(start.to(torch.float32), len(table.sizes))]
    if not table.sizes.any():
        return torch.zeros(len(table.sizes), chunk.model.layout.size, dtype=torch.float64)
    batch = read(chunk.data, table, mean=False)
    inputs = batch.inputs.double() if batch.inputs.is_floating_point() else batch.inputs
    sums = chunk.model.clipped_sums(params, replace(batch, inputs=inputs, weights=batch.weights.double()), clip_norm)
    return sums.mul_(-settings.learning_rate / settings.batch_size)
