"""Batches of many clients as one padded table of example numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from discreet.simulation.client_examples import Numbers, SharedExamples


@dataclass(frozen=True, eq=False)
class Table:
    """The examples of the clients of a chunk, those with most of them first.

    Attributes:
        numbers: (clients, largest size), rows of the data set; beyond a client's size its first example stands again,
            so that padding never reads what the client does not hold. 0 for a client without examples.
        sizes: (clients,), descending.
    """

    numbers: Numbers
    sizes: Numbers

    def __post_init__(self) -> None:
        if (np.diff(self.sizes) > 0).any():
            raise ValueError("sizes must not ascend: the clients with most examples come first")

    def active(self, position: int) -> int:
        """The number of clients with more than `position` examples: they are the first ones."""
        return int(np.searchsorted(-self.sizes, -position, side="left"))


def table_of(examples: list[Numbers]) -> Table:
    """The table of clients with these examples, whose sizes must not ascend."""
    sizes = np.array([len(numbers) for numbers in examples], dtype=np.int64)
    width = int(sizes.max(initial=0))
    numbers = np.zeros((len(examples), width), dtype=np.int64)
    filled = sizes > 0
    numbers[filled] = np.array([part[0] for part in examples if len(part)], dtype=np.int64)[:, None]
    numbers[np.arange(width) < sizes[:, None]] = np.concatenate(examples) if examples else 0
    return Table(numbers, sizes)


@dataclass(frozen=True, eq=False)
class BatchNumbers:
    """One batch of each of the first k clients: example numbers (k, width), and how many of each row count, (k,)."""

    numbers: Numbers
    counts: Numbers


def shuffled_batches(table: Table, orders: Numbers, *, batch_size: int) -> Iterator[BatchNumbers]:
    """One epoch: every client's examples in its own order, cut into batches; the last one of a client may be short.

    Args:
        orders: (clients, largest size), as `Draws.permutations` gives them.
    """
    numbers = np.take_along_axis(table.numbers, orders, axis=1)
    for start in range(0, numbers.shape[1], batch_size):
        active = table.active(start)
        counts = np.minimum(table.sizes[:active] - start, batch_size)
        yield BatchNumbers(numbers[:active, start : start + batch_size], counts)


def poisson_batch(table: Table, clients: Numbers, positions: Numbers, *, active: int) -> BatchNumbers:
    """The Poisson batch of the first `active` clients; the width is that of the largest, which may be 0.

    Args:
        clients, positions: (m,) which examples are in, ascending by client, as `Draws.batches` gives them.
    """
    counts = np.bincount(clients, minlength=active).astype(np.int64, copy=False)
    width = int(counts.max(initial=0))
    numbers = np.repeat(table.numbers[:active, :1], width, axis=1)
    first = np.cumsum(counts) - counts
    numbers[clients, np.arange(len(clients)) - first[clients]] = table.numbers[clients, positions]
    return BatchNumbers(numbers, counts)


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of k clients, read from the data set.

    Attributes:
        inputs: (k, width, *input_shape).
        targets: (k, width), int64; or (k, width, labels or numbers), float32.
        weights: (k, width), of each example's gradient; 0 for padding.
    """

    inputs: Tensor
    targets: Tensor
    weights: Tensor


def read_mean(data: SharedExamples, batch: BatchNumbers) -> Batch:
    """A batch whose weights make each client's sum a mean: 1 / count for what counts."""
    return _read(data, number_mean(data.targets, batch))


def read_sum(data: SharedExamples, batch: BatchNumbers) -> Batch:
    """A batch with the weight 1 for what counts."""
    return _read(data, _number(data.targets, batch, torch.ones(len(batch.counts))))


def number_mean(targets: Tensor, batch: BatchNumbers) -> Batch:
    """As `read_mean`, with the numbers of the examples, (k, width), in the place of their inputs."""
    return _number(targets, batch, torch.from_numpy(1 / np.maximum(batch.counts, 1).astype(np.float32)))


def _number(targets: Tensor, batch: BatchNumbers, weight: Tensor) -> Batch:
    numbers, width = torch.from_numpy(np.ascontiguousarray(batch.numbers)), batch.numbers.shape[1]
    weights = weight.unsqueeze(1).expand(numbers.shape)
    if (batch.counts < width).any():
        weights = weights * torch.from_numpy(np.arange(width) < batch.counts[:, None])
    numbers = numbers.to(targets.device)
    found = targets.index_select(0, numbers.flatten()).view(*numbers.shape, *targets.shape[1:])
    return Batch(numbers, found, weights.to(targets.device))


def _read(data: SharedExamples, batch: Batch) -> Batch:
    inputs = data.read(batch.inputs.flatten())
    return replace(batch, inputs=inputs.view(*batch.inputs.shape, *data.inputs.shape[1:]))
