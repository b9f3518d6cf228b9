"""Plain SGD without touching the largest weight: a linear first layer stays within the span of a client's examples.

The gradient of a linear layer's weight is G^T X, with X the layer's inputs and G the gradients at its outputs. For the
first layer X are examples, so after any number of steps of SGD, with momentum too,

    W = W_0 + A^T X        X: (n, width), all examples of the client;  A: (n, out), what they have added up to

and the outputs that the next step needs are X W^T = X W_0^T + (X X^T) A. One product for all clients gives X W_0^T,
one a client gives the Gram matrix X X^T, and one at the end gives the update A^T X. In between a step reads and writes
n numbers where W has `width`. For a perceptron on images that is as many operations as one epoch done directly, in
better shape, and fewer for every further epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from discreet.training.local_training import LocalSettings
from simulation.batches import Batch, Rows, Table, read_rows, shuffled_batches
from simulation.chunk import Chunk, Descent, descent_of
from simulation.layers import Dense
from simulation.parameter_layout import ParameterLayout
from simulation.resident import Resident
from simulation.stacked_models import Stack, add_bias

# Measured: moving a float through the cache costs as much as so many operations.
OPERATIONS_PER_FLOAT = 16
# The span wins where it needs fewer operations by this factor: it has a few more calls in every step.
GAIN = 0.75


def spans(stack: Stack, examples: int, settings: LocalSettings) -> bool:
    """Whether clients of so many examples are better trained in the span: plain SGD, and a linear first layer that is
    large for them."""
    if settings.example or not isinstance(stack.layers[0], Dense):
        return False
    out, width = stack.layout.blocks[0].shape[:2]
    steps = -(-examples // settings.batch_size)
    direct = settings.epochs * out * width * (4 * examples + 3 * OPERATIONS_PER_FLOAT * steps)
    spanned = 2 * examples * (examples * width + 2 * out * width + settings.epochs * examples * out)
    return 0 < spanned < GAIN * direct


@dataclass(frozen=True, eq=False)
class Span:
    """The first layer of k clients.

    Attributes:
        inputs: X, (k, n, width).
        gram: X X^T, (k * n, n).
        outputs: X W_0^T, (k * n, out).
        added: A, (k, n, out), which grows.
        velocity: the momentum of A, of the same shape; None without momentum.
    """

    inputs: Tensor
    gram: Tensor
    outputs: Tensor
    added: Tensor
    velocity: Tensor | None

    def forward(self, rows: Tensor, bias: Tensor) -> Tensor:
        """The layer's outputs (active, width of the batch, out) for rows of `outputs`, (active, width of the batch)."""
        flat, active = rows.flatten(), len(rows)
        gram = self.gram.index_select(0, flat).view(*rows.shape, -1)
        before = self.outputs.index_select(0, flat).view(*rows.shape, -1)
        return before.baddbmm_(gram, self.added[:active]).add_(bias.unsqueeze(1))

    def step(self, rows: Tensor, grads: Tensor, settings: LocalSettings) -> None:
        """One step of SGD with these gradients at the outputs."""
        flat, found = rows.flatten(), grads.flatten(0, 1)
        if self.velocity is None:
            self.added.flatten(0, 1).index_add_(0, flat, found, alpha=-settings.learning_rate)
            return
        moving = self.velocity[: len(rows)].mul_(settings.momentum)
        moving.flatten(0, 1).index_add_(0, flat, found)
        self.added[: len(rows)].sub_(moving, alpha=settings.learning_rate)

    def write_change(self, rows: Tensor) -> None:
        """A^T X, the change of the weight, into `rows` (k, out, width)."""
        torch.bmm(self.added.transpose(1, 2), self.inputs, out=rows)


def span_of(inputs: Tensor, weight: Tensor, *, momentum: float) -> Span:
    """The span of inputs (k, n, width) from the weight (out, width), where nothing has been added yet."""
    clients, examples, _ = inputs.shape
    added = inputs.new_zeros(clients, examples, len(weight))
    return Span(
        inputs,
        torch.bmm(inputs, inputs.transpose(1, 2)).flatten(0, 1),
        inputs.flatten(0, 1) @ weight.t(),
        added,
        torch.zeros_like(added) if momentum else None,
    )


def span_sgd(stack: Stack, start: Tensor, data: Resident, chunk: Chunk) -> Tensor:
    """What `simulation.stacked_training.stacked_updates` gives for plain SGD, (k, num_params).

    Args:
        stack: with a linear first layer.
        start: (num_params,).
        data: the resident data set.
        chunk: the clients; they are not asked for DP-SGD.
    """
    settings, sizes = chunk.settings[0], chunk.table.sizes
    numbers = torch.from_numpy(chunk.table.numbers).to(data.device)
    inputs = data.read(numbers.flatten()).view(*numbers.shape, -1)
    targets = data.targets.index_select(0, numbers.flatten())
    span = span_of(inputs, stack.layout.views(start.unsqueeze(0))[0][0], momentum=settings.momentum)
    rest = ParameterLayout(stack.layout.blocks[1:], stack.layout.size)
    descent = descent_of(rest.stack(start, len(sizes)), settings)
    # Batches are drawn from the rows of the span: those of one client after those of another.
    local = Table(np.arange(numbers.numel()).reshape(numbers.shape), sizes)
    for epoch in range(settings.epochs):
        orders = chunk.draws.permutations(sizes, epoch=epoch)
        for batch in shuffled_batches(local, orders, batch_size=settings.batch_size):
            _step(stack, span, descent, read_rows(targets, batch))
    rows = rest.change(descent.params, start)
    span.write_change(stack.layout.views(rows)[0])
    return rows


def _step(stack: Stack, span: Span, descent: Descent, batch: Rows) -> None:
    active = len(batch.rows)
    # The first parameter, the weight, is not there: no layer but the first reads it.
    current = [span.inputs, *descent.current(active)]
    outputs = span.forward(batch.rows, current[1])
    grads, uses = stack.passes(current, Batch(outputs, batch.targets, batch.weights), first=1)
    assert grads is not None
    into, keep, rate = descent.into(active)
    stack.apply(uses, [span.inputs, *into], keep=keep, rate=rate)
    add_bias(into[0], grads, keep=keep, rate=rate)
    span.step(batch.rows, grads, descent.settings)
    descent.settle(active)
