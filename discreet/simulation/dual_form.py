"""Plain SGD of many clients whose first linear layer is trained in its dual form.

A step changes the first weight by products of the client's own inputs and gradients. So after any
number of steps it is W_0 + A^T X, with the client's inputs X (n, width) and coefficients A
(n, out). With X X^T and X W_0^T, computed once, a step reads and writes only A, and no weight for
each client. The result is that of `Chunk.updates` up to rounding. It is faster if the weight is
large compared with the client's number of examples.

Shapes as in `layer_sequence`: k clients, n examples each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from discreet.privacy.private import Private
from discreet.simulation.chunk import Chunk, Table
from discreet.simulation.layer_sequence import (
    Batch,
    LayerSequence,
    Params,
)
from discreet.simulation.mapped_model import MappedModel
from discreet.training.local_training import LocalSettings, plain_sgd

OPERATIONS_PER_FLOAT = 16  # the cost of reading or writing a number, in multiplications
# The dual form is used if it takes at most this share of the cost, as it has a few more calls.
GAIN = 0.75


def largest_in_dual_form(model: LayerSequence | MappedModel, settings: LocalSettings) -> int:
    """The number of examples up to which clients are trained faster in the dual form; 0 if never.
    It covers SGD without DP-SGD, weight decay and schedule, on a model that begins with a linear
    layer."""
    if isinstance(model, MappedModel) or settings.example or not settings.is_plain:
        return 0
    if not model.begins_linear:
        return 0
    out, width = model.layout.parameters[0][0][:2]
    examples = 0
    while _is_cheaper(examples + 1, settings, out=out, width=width):
        examples += 1
    return examples


def _is_cheaper(examples: int, settings: LocalSettings, *, out: int, width: int) -> bool:
    """True if the dual form takes less than the share `GAIN` of the cost."""
    steps = -(-examples // settings.batch_size)
    direct = settings.epochs * out * width * (4 * examples + 3 * OPERATIONS_PER_FLOAT * steps)
    dual = 2 * examples * (examples * width + 2 * out * width + settings.epochs * examples * out)
    return dual < GAIN * direct


@dataclass(frozen=True, eq=False, repr=False)
class DualForm(Private):
    """The clients of a chunk, as `SgdClients`. Their parameters are A (k, n, out), then all
    parameters of the model except the first weight.

    Attributes:
        chunk: the clients, whose rows of examples are numbered 0 to k * n - 1.
        model: their model.
        targets: of these rows, (k * n, ...).
        gram: X X^T, (k * n, n).
        outputs: X W_0^T, (k * n, out).
    """

    chunk: Chunk
    model: LayerSequence
    targets: Tensor
    gram: Tensor
    outputs: Tensor

    def shuffled_batches(self, epoch: int) -> Iterator[tuple[int, Table]]:
        return self.chunk.shuffled_batches(epoch)

    def add_mean_gradients(
        self, params: Params, batch: Table, into: Params, *, keep: float, rate: float
    ) -> None:
        rows = torch.from_numpy(np.ascontiguousarray(batch.numbers)).to(self.gram.device)
        found = rows.flatten()
        gram = self.gram.index_select(0, found).view(*rows.shape, -1)
        outputs = self.outputs.index_select(0, found).view(*rows.shape, -1)
        outputs = outputs.baddbmm_(gram, params[0]).add_(params[1].unsqueeze(1))
        targets = self.targets.index_select(0, found)
        targets = targets.view(*rows.shape, *targets.shape[1:])
        read = Batch(outputs, targets, self.chunk.weights(batch, mean=True))
        grads, uses = self.model.passes(params, read, start=self.model.first + 1)
        assert grads is not None
        self.model.apply(uses, into, keep=keep, rate=rate)
        if keep != 1:
            into[0].mul_(keep)
            into[1].mul_(keep)
        into[0].flatten(0, 1).index_add_(0, found, grads.flatten(0, 1), alpha=rate)
        into[1].add_(grads.sum(1), alpha=rate)


def dual_updates(chunk: Chunk, start: Tensor) -> Tensor:
    """As `Chunk.updates`, (k, num_params), for the cases that `largest_in_dual_form` covers.

    Raises:
      ValueError: the clients are trained by DP-SGD, whose gradients must be clipped and noised.
    """
    if chunk.settings[0].example:
        raise ValueError("DP-SGD has no dual form")
    assert isinstance(chunk.model, LayerSequence)
    layout = chunk.model.layout
    start = start.to(torch.float32)
    clients, examples = chunk.table.numbers.shape
    numbers = torch.from_numpy(chunk.table.numbers).to(chunk.data.device).flatten()
    inputs = chunk.data.read(numbers).view(clients, examples, -1)
    before = layout.views(start.unsqueeze(0))
    weight = before[0][0]
    own = np.arange(clients * examples).reshape(clients, examples)
    form = DualForm(
        replace(chunk, table=replace(chunk.table, numbers=own)),
        chunk.model,
        targets=chunk.data.targets.index_select(0, numbers),
        gram=torch.bmm(inputs, inputs.transpose(1, 2)).flatten(0, 1),
        outputs=inputs.flatten(0, 1) @ weight.t(),
    )
    others = [values.repeat_interleave(clients, 0) for values in before[1:]]
    coefficients = inputs.new_zeros(clients, examples, len(weight))
    plain_sgd(form, [coefficients, *others], chunk.settings[0])
    rows = start.new_empty(clients, layout.size)
    changes = layout.views(rows)
    torch.bmm(coefficients.transpose(1, 2), inputs, out=changes[0])
    for change, values, first in zip(changes[1:], others, before[1:], strict=True):
        torch.sub(values, first, out=change)
    return rows
