"""The data set, held once for all virtual clients, and padded batches of rows that they hold, never copies."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from discreet.data.examples import Examples
from discreet.data.partition import ClientExamples, Numbers, held_out_rows, split_rows
from discreet.settings.data import EvaluationConfig

WHITE = 255
PIECE = 512


@dataclass(frozen=True, eq=False)
class SharedExamples:
    """Examples; `inputs` (n, ...) that are whole 255ths, as images are, stand as bytes: a fourth of the memory to
    read, with which a round of logistic regression takes a fifth less time."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def __reduce__(self) -> tuple[Callable[..., SharedExamples], tuple[Any, ...]]:
        """To another process as arrays, which those of one machine may map. From the CPU alone."""
        return _mapped_examples, (self.inputs.numpy(), self.targets.numpy())

    @property
    def device(self) -> torch.device:
        return self.inputs.device

    def read(self, rows: Tensor) -> Tensor:
        """The inputs of `rows`, (m,) int64: (m, *input_shape), the very values that the examples had."""
        found = self.inputs.index_select(0, rows)
        return found.to(torch.float32).div_(WHITE) if found.dtype == torch.uint8 else found


@dataclass(frozen=True, eq=False)
class HeldExamples:
    """The examples of one client, by their numbers (n,), which are read when they are asked for: features of texts can
    be larger than the memory."""

    data: SharedExamples
    numbers: Tensor

    def __len__(self) -> int:
        return len(self.numbers)

    def subset(self, indices: Tensor | slice) -> Examples:
        """As `Examples.subset`."""
        rows = self.numbers[indices]
        return Examples(self.data.read(rows), self.data.targets[rows])


def _mapped_examples(inputs: NDArray[Any], targets: NDArray[Any]) -> SharedExamples:
    return SharedExamples(read_only(inputs), read_only(targets))


def read_only(values: NDArray[Any]) -> Tensor:
    """An array that is mapped for reading alone, as a tensor without a copy. Nobody may write to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return torch.from_numpy(values)


def shared_examples(examples: Examples, device: torch.device) -> SharedExamples:
    """The examples on a device, as bytes if that gives the same values again."""
    inputs = _as_bytes(examples.inputs) if examples.inputs.is_floating_point() else None
    return SharedExamples((examples.inputs if inputs is None else inputs).to(device), examples.targets.to(device))


def _as_bytes(inputs: Tensor) -> Tensor | None:
    """None if a value is not a whole 255th in [0, 1], to the last bit."""
    whole = torch.empty(inputs.shape, dtype=torch.uint8)
    for start in range(0, len(inputs), PIECE):
        piece = inputs[start : start + PIECE]
        whole[start : start + PIECE] = (piece * WHITE).round_().clamp_(0, WHITE)
        if not torch.equal(whole[start : start + PIECE].to(torch.float32).div_(WHITE), piece):
            return None
    return whole


@dataclass(frozen=True)
class TrainedExamples:
    """The examples that clients train on if they hold a share of them out."""

    every: ClientExamples
    share: float

    def __len__(self) -> int:
        return len(self.every)

    def sizes(self, clients: Numbers) -> Numbers:
        pairs = zip(clients.tolist(), self.every.sizes(clients).tolist(), strict=True)
        return np.array([n - len(held_out_rows(n, one, share=self.share)) for one, n in pairs], dtype=np.int64)

    def examples(self, client: int) -> Numbers:
        numbers = self.every.examples(client)
        chosen: Numbers = numbers[split_rows(len(numbers), client, share=self.share)[0].numpy()]
        return chosen

    def held_out(self, client: int) -> Numbers:
        """The numbers of the examples that a client holds out, (m,)."""
        numbers = self.every.examples(client)
        chosen: Numbers = numbers[held_out_rows(len(numbers), client, share=self.share).numpy()]
        return chosen


def trained_on(dealt: ClientExamples, evaluation: EvaluationConfig) -> ClientExamples | TrainedExamples:
    """What clients train on, of what they hold, in a run with these ratings."""
    return TrainedExamples(dealt, evaluation.share) if evaluation.private else dealt


@dataclass(frozen=True, eq=False)
class Table:
    """Some examples of each of some clients: all that those of a chunk hold, or a batch of each.

    Attributes:
        numbers: (clients, largest size), rows of the data set; beyond a client's size its first example stands again,
            so that padding never reads what the client does not hold. 0 for a client without examples.
        sizes: (clients,), descending for a chunk.
    """

    numbers: Numbers
    sizes: Numbers

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


def shuffled_batches(table: Table, orders: Numbers, *, batch_size: int) -> Iterator[Table]:
    """One epoch: every client's examples in its own order (`Draws.permutations`), cut; the last batch is short."""
    numbers = np.take_along_axis(table.numbers, orders, axis=1)
    for start in range(0, numbers.shape[1], batch_size):
        active = table.active(start)
        counts = np.minimum(table.sizes[:active] - start, batch_size)
        yield Table(numbers[:active, start : start + batch_size], counts)


def poisson_batch(table: Table, clients: Numbers, positions: Numbers, *, active: int) -> Table:
    """The Poisson batch of the first `active` clients, as `Draws.batches` gives it; it may be of width 0."""
    counts = np.bincount(clients, minlength=active).astype(np.int64, copy=False)
    width = int(counts.max(initial=0))
    numbers = np.repeat(table.numbers[:active, :1], width, axis=1)
    first = np.cumsum(counts) - counts
    numbers[clients, np.arange(len(clients)) - first[clients]] = table.numbers[clients, positions]
    return Table(numbers, counts)


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of k clients, read from the data set: (k, width, ...) each. `weights` (k, width) are of gradients, 0 for
    padding."""

    inputs: Tensor
    targets: Tensor
    weights: Tensor


def read(data: SharedExamples, batch: Table, *, mean: bool) -> Batch:
    """A batch with the weight 1 for what counts; with `mean` 1 / count, so that a client's sum is a mean."""
    shape, width = batch.numbers.shape, batch.numbers.shape[1]
    weight = 1 / np.maximum(batch.sizes, 1).astype(np.float32) if mean else np.ones(len(batch.sizes), np.float32)
    weights = torch.from_numpy(weight).unsqueeze(1).expand(shape)
    if (batch.sizes < width).any():
        weights = weights * torch.from_numpy(np.arange(width) < batch.sizes[:, None])
    rows = torch.from_numpy(np.ascontiguousarray(batch.numbers)).to(data.device).flatten()
    inputs, targets = data.read(rows), data.targets.index_select(0, rows)
    return Batch(
        inputs.view(*shape, *inputs.shape[1:]), targets.view(*shape, *targets.shape[1:]), weights.to(data.device)
    )
