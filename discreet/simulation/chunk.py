"""Clients that are trained together: batches, gradients and noise of all of them at once, for the loops of
`discreet.training.local_training`.

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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from discreet.privacy.mechanisms import Gaussian
from discreet.simulation.batches import (
    BatchNumbers,
    Table,
    number_mean,
    poisson_batch,
    read_mean,
    read_sum,
    shuffled_batches,
)
from discreet.simulation.client_examples import SharedExamples
from discreet.simulation.draws import Draws
from discreet.simulation.layer_sequence import LayerSequence, ParameterLayout, add_bias
from discreet.simulation.layers import Dense, Params
from discreet.training.local_training import LocalSettings, dp_sgd, plain_sgd, sgd

# Measured: moving a float through the cache costs as much as so many operations.
OPERATIONS_PER_FLOAT = 16
# The dual form wins if it needs fewer operations by this factor: it has a few more calls in every step.
GAIN = 0.75


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

    model: LayerSequence
    data: SharedExamples
    table: Table
    settings: Sequence[LocalSettings]
    draws: Draws

    def shuffled_batches(self, epoch: int) -> Iterator[tuple[int, BatchNumbers]]:
        orders = self.draws.permutations(self.table.sizes, epoch=epoch)
        for batch in shuffled_batches(self.table, orders, batch_size=self.settings[0].batch_size):
            yield len(batch.counts), batch

    def add_mean_gradients(
        self, params: Params, batch: BatchNumbers, into: Params, *, keep: float, rate: float
    ) -> None:
        self.model.accumulate(params, read_mean(self.data, batch), into, keep=keep, rate=rate)

    def poisson_batch(self, probabilities: Sequence[float], *, step: int) -> BatchNumbers:
        active = len(probabilities)
        clients, positions = self.draws.batches(self.table.sizes[:active], probabilities, step=step)
        return poisson_batch(self.table, clients, positions, active=active)

    def clipped_sums(self, params: Params, batch: BatchNumbers, clip_norm: float) -> Tensor:
        if not batch.counts.any():
            return params[0].new_zeros(len(batch.counts), self.model.layout.size)
        return self.model.clipped_sums(params, read_sum(self.data, batch), clip_norm)

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
    if dual_is_cheaper(chunk.model, max(sizes), settings):
        return dual_sgd(chunk, start)
    params = chunk.model.layout.copies(start, len(sizes))
    if settings.example:
        dp_sgd(chunk, params, sizes, settings)
    else:
        sgd(chunk, params, sizes, settings)
    return chunk.model.layout.change(params, start)


@torch.no_grad()
def chunk_steps(chunk: Chunk, start: Tensor, clip_norm: float) -> Tensor:
    """Each client's step over all its examples, (k, num_params), float64: `discreet.training.shared_step`, for many."""
    settings, table = chunk.settings[0], chunk.table
    params = [values.double() for values in chunk.model.layout.copies(start.to(torch.float32), len(table.sizes))]
    if not table.sizes.any():
        return torch.zeros(len(table.sizes), chunk.model.layout.size, dtype=torch.float64)
    read = read_sum(chunk.data, BatchNumbers(table.numbers, table.sizes))
    inputs = read.inputs.double() if read.inputs.is_floating_point() else read.inputs
    sums = chunk.model.clipped_sums(params, replace(read, inputs=inputs, weights=read.weights.double()), clip_norm)
    return sums.mul_(-settings.learning_rate / settings.batch_size)


def dual_is_cheaper(model: LayerSequence, examples: int, settings: LocalSettings) -> bool:
    """True if clients of so many examples are trained faster in the dual form: plain SGD, and a linear first layer that
    is large for them. Other optimizers, weight decay and schedules have no dual form here."""
    if settings.example or not settings.is_plain or not isinstance(model.layers[0], Dense):
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
        inputs: X, (k, n, width).
        targets: of these examples, (k * n,).
        gram: X X^T, (k * n, n).
        outputs: X W_0^T, (k * n, out).
    """

    chunk: Chunk
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
        rows = number_mean(self.targets, batch)
        found = rows.inputs.flatten()
        gram = self.gram.index_select(0, found).view(*rows.inputs.shape, -1)
        before = self.outputs.index_select(0, found).view(*rows.inputs.shape, -1)
        outputs = before.baddbmm_(gram, params[0]).add_(params[1].unsqueeze(1))
        # No layer but the first reads the first parameter, which is not the weight here.
        grads, uses = self.chunk.model.passes(params, replace(rows, inputs=outputs), first=1)
        assert grads is not None
        self.chunk.model.apply(uses, into, keep=keep, rate=rate)
        add_bias(into[1], grads, keep=keep, rate=rate)
        if keep != 1:
            into[0].mul_(keep)
        into[0].flatten(0, 1).index_add_(0, found, grads.flatten(0, 1), alpha=rate)


def dual_sgd(chunk: Chunk, start: Tensor) -> Tensor:
    """As `chunk_updates`, for plain SGD on a model with a linear first layer."""
    layout, (clients, examples) = chunk.model.layout, chunk.table.numbers.shape
    numbers = torch.from_numpy(chunk.table.numbers).to(chunk.data.device).flatten()
    inputs, weight = chunk.data.read(numbers).view(clients, examples, -1), layout.views(start.unsqueeze(0))[0][0]
    gram, outputs = torch.bmm(inputs, inputs.transpose(1, 2)).flatten(0, 1), inputs.flatten(0, 1) @ weight.t()
    rest = ParameterLayout(layout.blocks[1:], layout.size)
    added, others = inputs.new_zeros(clients, examples, len(weight)), rest.copies(start, clients)
    plain_sgd(
        DualForm(chunk, inputs, chunk.data.targets.index_select(0, numbers), gram, outputs),
        [added, *others],
        chunk.settings[0],
    )
    rows = rest.change(others, start)
    torch.bmm(added.transpose(1, 2), inputs, out=layout.views(rows)[0])
    return rows
