"""The data set, held once for all virtual clients, and which of its rows each of them has: never copies."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from discreet.settings.data import DataConfig
from discreet.tasks.examples import Examples, Task
from discreet.tasks.partition import held_out_rows, sampled_indices, split_rows, task_partition

Numbers = NDArray[np.int64]

WHITE = 255
PIECE = 512


@dataclass(frozen=True, eq=False)
class SharedExamples:
    """Examples; `inputs` that are whole 255ths, as images are, stand as bytes: a fourth of the memory to read.

    Attributes:
        inputs: (n, *input_shape): float32, int64, or bytes that count 255ths.
        targets: (n,), int64, or (n, labels or numbers), float32.
    """

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


class ClientExamples(Protocol):
    """The examples of each client, by its number."""

    def __len__(self) -> int:
        """The number of clients."""

    def sizes(self, clients: Numbers) -> Numbers:
        """The number of examples of each of `clients` (k,), (k,); 0 is allowed."""

    def examples(self, client: int) -> Numbers:
        """The numbers of a client's examples, (n,), in the client's own order."""


@dataclass(frozen=True, eq=False)
class PartitionedExamples:
    """Clients that share the examples out: each example has one holder. `parts`: the examples of each client."""

    parts: Sequence[Tensor]

    def __len__(self) -> int:
        return len(self.parts)

    def __reduce__(self) -> tuple[Callable[..., PartitionedExamples], tuple[Any, ...]]:
        """To another process as two arrays: parts are often views of one tensor, and each would bring all of it."""
        every = torch.cat([torch.zeros(0, dtype=torch.int64), *self.parts])
        return _split_again, (every.numpy(), [len(part) for part in self.parts])

    def sizes(self, clients: Numbers) -> Numbers:
        return np.array([len(self.parts[client]) for client in clients], dtype=np.int64)

    def examples(self, client: int) -> Numbers:
        numbers: Numbers = self.parts[client].numpy()
        return numbers


def _split_again(every: NDArray[Any], sizes: list[int]) -> PartitionedExamples:
    return PartitionedExamples(torch.split(read_only(every), sizes))


@dataclass(frozen=True)
class SampledExamples:
    """Any number of clients, each with `examples_per_client` different examples that its number and `seed` decide.

    Nothing is held for a client: a million of them cost nothing until they take part. Clients share examples, so
    adding or removing one client is one client's view more or less, as for any other population; what an
    example-level guarantee says of an example holds for each of its copies by itself.

    >>> examples = SampledExamples(num_clients=10**6, num_examples=100, examples_per_client=3, seed=20731)
    >>> len(examples), len(set(examples.examples(999_999).tolist()))
    (1000000, 3)
    """

    num_clients: int
    num_examples: int
    examples_per_client: int
    seed: int

    def __len__(self) -> int:
        return self.num_clients

    def sizes(self, clients: Numbers) -> Numbers:
        return np.full(len(clients), self.examples_per_client, dtype=np.int64)

    def examples(self, client: int) -> Numbers:
        """The time depends on `examples_per_client` alone."""
        count, each = self.num_examples, self.examples_per_client
        numbers: Numbers = sampled_indices(client, num_examples=count, examples_per_client=each, seed=self.seed).numpy()
        return numbers


@dataclass(frozen=True)
class TrainedExamples:
    """The examples that clients train on if they hold a share of them out, by `discreet.tasks.partition`."""

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
        """The numbers of the examples that a client holds out, (m,), in its own order."""
        numbers = self.every.examples(client)
        chosen: Numbers = numbers[held_out_rows(len(numbers), client, share=self.share).numpy()]
        return chosen


def client_examples_of(task: Task, data: DataConfig) -> ClientExamples:
    """The examples of each client of a partition."""
    if data.examples_per_client is None:
        return PartitionedExamples(task_partition(task, data))
    return SampledExamples(data.num_clients, len(task.train), data.examples_per_client, data.partition_seed)
