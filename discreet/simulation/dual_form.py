"""Plain SGD on a linear first layer in its dual form: what moves are coefficients of a client's examples, not weights.

The gradient of a linear layer's weight is G^T X, with X the layer's inputs and G the gradients at its outputs. For the
first layer X are examples, so after any number of steps of SGD, with momentum too,

    W = W_0 + A^T X        X: (n, width), all examples of the client;  A: (n, out), what they have added up to

and the outputs that the next step needs are X W^T = X W_0^T + (X X^T) A. One product for all clients gives X W_0^T,
one a client gives the Gram matrix X X^T, and one at the end gives the update A^T X. In between a step reads and writes
n numbers where W has `width`. For a perceptron on images that is as many operations as one epoch done directly, in
better shape, and fewer for every further epoch.

The MLP's clients are trained 1.4 times as fast as by `chunk.py` alone (60 images, batches of 10, one epoch).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from discreet.simulation.batches import BatchNumbers, number_mean
from discreet.simulation.chunk import Chunk
from discreet.simulation.layer_sequence import LayerSequence, ParameterLayout, add_bias
from discreet.simulation.layers import Dense
from discreet.training.local_training import LocalSettings, plain_sgd

# Measured: moving a float through the cache costs as much as so many operations.
OPERATIONS_PER_FLOAT = 16
# The dual form wins if it needs fewer operations by this factor: it has a few more calls in every step.
GAIN = 0.75


def dual_is_cheaper(model: LayerSequence, examples: int, settings: LocalSettings) -> bool:
    """Whether clients of so many examples are better trained in the dual form: plain SGD, and a linear first layer that
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
        self, params: list[Tensor], batch: BatchNumbers, into: list[Tensor], *, keep: float, rate: float
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
    """What `discreet.simulation.cohort.chunk_updates` gives for plain SGD, (k, num_params).

    Args:
        chunk: of a model with a linear first layer.
        start: (num_params,).
    """
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
