"""Clients that are trained together: draws, gradients and noise of all of them at once, for the loops of
`discreet.training.local_training`.

With a seed every client draws from its own streams, the very ones that it would draw from by itself. Without one,
nobody can repeat a draw, and one secure stream serves all of them in bulk: a draw for each would halve the speed of
logistic regression.

With plain SGD a linear first layer may be trained in its dual form: by coefficients of a client's examples in place of
weights. The gradient of its weight is G^T X, with X the layer's inputs and G the gradients at its outputs. For the
first layer X are examples, so after any number of steps of SGD, with momentum too,

    W = W_0 + A^T X        X: (n, width), all examples of the client;  A: (n, out), the sum of the steps

and the outputs that the next step needs are X W^T = X W_0^T + (X X^T) A. One product for all clients gives X W_0^T,
one a client gives the Gram matrix X X^T, and one at the end gives the update A^T X. In between a step reads and writes
n numbers where W has `width`. For a perceptron on images that is as many operations as one epoch done directly, in
better shape, and fewer for every further epoch: the MLP's clients are trained 1.4 times as fast (60 images, batches of
10, one epoch).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from discreet.data.examples import Examples
from discreet.data.partition import Numbers
from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.randomness import RandomSource
from discreet.privacy.sampling import poisson_sample
from discreet.simulation.client_examples import (
    BatchNumbers,
    SharedExamples,
    Table,
    poisson_batch,
    read,
    shuffled_batches,
    with_numbers,
)
from discreet.simulation.layer_sequence import Dense, Flatten, LayerSequence, add_bias
from discreet.simulation.mapped_model import MappedModel
from discreet.simulation.parameter_layout import ParameterLayout, Params
from discreet.training.local_training import (
    LocalSettings,
    dp_sgd,
    epoch_order,
    local_update,
    plain_sgd,
    sgd,
    shared_step,
    step_batch,
    step_noise,
)

# Measured: moving a float through the cache costs as much as so many operations.
OPERATIONS_PER_FLOAT = 16
# The dual form wins if it needs fewer operations by this factor: it has a few more calls in every step.
GAIN = 0.75


@dataclass(frozen=True, eq=False)
class SeededDraws:
    """One source a client: the numbers are those of `discreet.training.local_training` for the same source.

    Rows are clients; those that draw come first, so `sizes` may name fewer than there are.
    """

    sources: Sequence[RandomSource]

    def permutations(self, sizes: Numbers, *, epoch: int) -> Numbers:
        """A random order of each client's examples, (k, largest size), 0 beyond a client's size."""
        orders = np.zeros((len(sizes), max(sizes, default=0)), dtype=np.int64)
        for row, size in enumerate(sizes.tolist()):
            orders[row, :size] = epoch_order(self.sources[row], epoch, size).numpy()
        return orders

    def batches(self, sizes: Numbers, probabilities: Sequence[float], *, step: int) -> tuple[Numbers, Numbers]:
        """Poisson batches: clients and positions of the examples that are in, both (m,), ascending by client."""
        found = []
        for source, size, probability in zip(self.sources, sizes.tolist(), probabilities, strict=False):
            found.append(step_batch(source, step, size, probability=probability).numpy())
        clients = np.repeat(np.arange(len(found)), [len(positions) for positions in found])
        return clients, _concatenated(found)

    def add_noise(self, totals: Tensor, mechanisms: Sequence[Gaussian], sensitivity: float, *, step: int) -> Tensor:
        """Each row of `totals` (k, d) plus its own noise for `sensitivity`."""
        noised = torch.empty_like(totals)
        for row, mechanism in enumerate(mechanisms[: len(totals)]):
            noised[row] = mechanism.add_noise(totals[row], sensitivity, step_noise(self.sources[row], step))
        return noised

    def of(self, row: int) -> RandomSource:
        """The source of a client."""
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
        for start, stop in _runs(sizes):
            size = int(sizes[start])
            chosen = poisson_sample((stop - start) * size, probability=probabilities[start], source=self.source).numpy()
            clients.append(start + chosen // max(size, 1))
            positions.append(chosen % max(size, 1))
        return _concatenated(clients), _concatenated(positions)

    def add_noise(self, totals: Tensor, mechanisms: Sequence[Gaussian], sensitivity: float, *, step: int) -> Tensor:
        if all(mechanism == mechanisms[0] for mechanism in mechanisms[: len(totals)]):
            return mechanisms[0].add_noise(totals, sensitivity, self.source) if len(totals) else totals
        rows = [
            mechanism.add_noise(row, sensitivity, self.source)
            for row, mechanism in zip(totals, mechanisms, strict=False)
        ]
        return torch.stack(rows)

    def of(self, row: int) -> RandomSource:
        return self.source


Draws = SeededDraws | SecureDraws


def _runs(sizes: Numbers) -> Iterator[tuple[int, int]]:
    """(start, stop) of each stretch of equal sizes."""
    if not len(sizes):
        return iter(())
    edges = [0, *(np.flatnonzero(np.diff(sizes)) + 1).tolist(), len(sizes)]
    return pairwise(edges)


def _concatenated(parts: list[Numbers]) -> Numbers:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Chunk:
    """`SgdClients` and `DpSgdClients` by the passes of its layers.

    Attributes:
        model: the architecture.
        data: the data set that all clients share.
        table: which examples the clients hold, those with most of them first.
        settings: of each; they differ in the noise of DP-SGD at most.
        draws: their random numbers, row by row.
    """

    model: LayerSequence | MappedModel
    data: SharedExamples
    table: Table
    settings: Sequence[LocalSettings]
    draws: Draws

    def examples(self, row: int) -> Examples:
        """Those of one client."""
        numbers = torch.from_numpy(self.table.numbers[row, : self.table.sizes[row]]).to(self.data.device)
        return Examples(self.data.read(numbers), self.data.targets[numbers])

    def shuffled_batches(self, epoch: int) -> Iterator[tuple[int, BatchNumbers]]:
        orders = self.draws.permutations(self.table.sizes, epoch=epoch)
        for batch in shuffled_batches(self.table, orders, batch_size=self.settings[0].batch_size):
            yield len(batch.counts), batch

    def add_mean_gradients(
        self, params: Params, batch: BatchNumbers, into: Params, *, keep: float, rate: float
    ) -> None:
        self.model.accumulate(params, read(self.data, batch, mean=True), into, keep=keep, rate=rate)

    def poisson_batch(self, probabilities: Sequence[float], *, step: int) -> BatchNumbers:
        active = len(probabilities)
        clients, positions = self.draws.batches(self.table.sizes[:active], probabilities, step=step)
        return poisson_batch(self.table, clients, positions, active=active)

    def clipped_sums(self, params: Params, batch: BatchNumbers, clip_norm: float) -> Tensor:
        if not batch.counts.any():
            return params[0].new_zeros(len(batch.counts), self.model.layout.size)
        return self.model.clipped_sums(params, read(self.data, batch, mean=False), clip_norm)

    def add_noise(self, sums: Tensor, clip_norm: float, *, step: int) -> Tensor:
        return self.draws.add_noise(sums, self._mechanisms, clip_norm, step=step)

    def views(self, rows: Tensor) -> Params:
        return self.model.layout.views(rows)

    @cached_property
    def _mechanisms(self) -> list[Gaussian]:
        return [settings.example.mechanism for settings in self.settings if settings.example]


def chunk_updates(chunk: Chunk, start: Tensor) -> Tensor:
    """The change of the parameters of each client, (k, num_params), float32, not clipped.

    Args:
        chunk: at least one client; one without examples is treated as in `local_update`.
        start: (num_params,), where everybody starts, on the device of the chunk's data.
    """
    start, settings, sizes = start.to(torch.float32), chunk.settings[0], chunk.table.sizes.tolist()
    if isinstance(chunk.model, MappedModel):
        if not chunk.model.together:
            return _updates_alone(chunk.model.model, chunk, start)
        chunk = replace(chunk, model=chunk.model.drawing(map(chunk.draws.of, range(len(sizes)))))
    if dual_is_cheaper(chunk.model, max(sizes), settings):
        return dual_sgd(chunk, start)
    params = chunk.model.layout.copies(start, len(sizes))
    if settings.example:
        dp_sgd(chunk, params, sizes, settings)
    else:
        sgd(chunk, params, sizes, settings)
    return chunk.model.layout.change(params, start)


def _updates_alone(model: nn.Module, chunk: Chunk, start: Tensor) -> Tensor:
    """As `chunk_updates`, one client after the other."""
    rows = []
    for row, settings in enumerate(chunk.settings):
        rows.append(local_update(model, start, chunk.examples(row), settings=settings, source=chunk.draws.of(row)))
    return torch.stack(rows)


@torch.no_grad()
def chunk_steps(chunk: Chunk, start: Tensor, clip_norm: float) -> Tensor:
    """Each client's step over all its examples, (k, num_params), float64: `shared_step`, for many."""
    settings, table = chunk.settings[0], chunk.table
    if isinstance(chunk.model, MappedModel):
        clips = [(clip_norm, chunk.draws.of(row)) for row in range(len(table.sizes))]
        model, held = chunk.model.model, [chunk.examples(row) for row in range(len(clips))]
        steps = [
            shared_step(model, start, some, settings=settings, clip=clip)
            for some, clip in zip(held, clips, strict=True)
        ]
        return torch.stack(steps)
    params = [values.double() for values in chunk.model.layout.copies(start.to(torch.float32), len(table.sizes))]
    if not table.sizes.any():
        return torch.zeros(len(table.sizes), chunk.model.layout.size, dtype=torch.float64)
    batch = read(chunk.data, BatchNumbers(table.numbers, table.sizes), mean=False)
    inputs = batch.inputs.double() if batch.inputs.is_floating_point() else batch.inputs
    sums = chunk.model.clipped_sums(params, replace(batch, inputs=inputs, weights=batch.weights.double()), clip_norm)
    return sums.mul_(-settings.learning_rate / settings.batch_size)


def dual_is_cheaper(model: LayerSequence | MappedModel, examples: int, settings: LocalSettings) -> bool:
    """True if clients of so many examples are trained faster in the dual form: plain SGD, and a linear first layer that
    is large for them. Other optimizers, weight decay and schedules have no dual form here."""
    if isinstance(model, MappedModel):
        return False
    reads_examples = all(isinstance(layer, Flatten) for layer in model.layers[: model.first])
    if (
        settings.example
        or not settings.is_plain
        or not reads_examples
        or not isinstance(model.layers[model.first], Dense)
    ):
        return False
    out, width = model.layout.blocks[0].shape[:2]
    steps = -(-examples // settings.batch_size)
    direct = settings.epochs * out * width * (4 * examples + 3 * OPERATIONS_PER_FLOAT * steps)
    dual = 2 * examples * (examples * width + 2 * out * width + settings.epochs * examples * out)
    return 0 < dual < GAIN * direct


@dataclass(frozen=True, eq=False)
class DualForm:
    """A chunk's clients as `SgdClients`: their parameters are A, (k, n, out), and all of the model's but the weight.

    Attributes:
        chunk: the clients; they are not asked for DP-SGD.
        model: theirs.
        inputs: X, (k, n, width).
        targets: of these examples, (k * n,).
        gram: X X^T, (k * n, n).
        outputs: X W_0^T, (k * n, out).
    """

    chunk: Chunk
    model: LayerSequence
    inputs: Tensor
    targets: Tensor
    gram: Tensor
    outputs: Tensor

    def shuffled_batches(self, epoch: int) -> Iterator[tuple[int, BatchNumbers]]:
        # Batches are drawn from the rows of X: those of one client after those of another.
        rows = np.arange(self.chunk.table.numbers.size).reshape(self.chunk.table.numbers.shape)
        return replace(self.chunk, table=replace(self.chunk.table, numbers=rows)).shuffled_batches(epoch)

    def add_mean_gradients(
        self, params: Params, batch: BatchNumbers, into: Params, *, keep: float, rate: float
    ) -> None:
        rows = with_numbers(self.targets, batch, mean=True)
        found = rows.inputs.flatten()
        gram = self.gram.index_select(0, found).view(*rows.inputs.shape, -1)
        before = self.outputs.index_select(0, found).view(*rows.inputs.shape, -1)
        outputs = before.baddbmm_(gram, params[0]).add_(params[1].unsqueeze(1))
        # No layer but the first reads the first parameter, which is not the weight here.
        grads, uses = self.model.passes(params, replace(rows, inputs=outputs), first=self.model.first + 1)
        assert grads is not None
        self.model.apply(uses, into, keep=keep, rate=rate)
        add_bias(into[1], grads, keep=keep, rate=rate)
        if keep != 1:
            into[0].mul_(keep)
        into[0].flatten(0, 1).index_add_(0, found, grads.flatten(0, 1), alpha=rate)


def dual_sgd(chunk: Chunk, start: Tensor) -> Tensor:
    """As `chunk_updates`, for plain SGD on a model with a linear first layer."""
    assert isinstance(chunk.model, LayerSequence)
    layout, (clients, examples) = chunk.model.layout, chunk.table.numbers.shape
    numbers = torch.from_numpy(chunk.table.numbers).to(chunk.data.device).flatten()
    inputs, weight = chunk.data.read(numbers).view(clients, examples, -1), layout.views(start.unsqueeze(0))[0][0]
    gram, outputs = torch.bmm(inputs, inputs.transpose(1, 2)).flatten(0, 1), inputs.flatten(0, 1) @ weight.t()
    rest = ParameterLayout(layout.blocks[1:], layout.size)
    added, others = inputs.new_zeros(clients, examples, len(weight)), rest.copies(start, clients)
    plain_sgd(
        DualForm(chunk, chunk.model, inputs, chunk.data.targets.index_select(0, numbers), gram, outputs),
        [added, *others],
        chunk.settings[0],
    )
    rows = rest.change(others, start)
    torch.bmm(added.transpose(1, 2), inputs, out=layout.views(rows)[0])
    return rows
