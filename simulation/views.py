"""Which examples a virtual client has: numbers of rows of the one resident data set, never copies of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from discreet.settings import DataConfig
from discreet.tasks.examples import Task
from discreet.tasks.partition import sampled_indices, task_partition

Numbers = NDArray[np.int64]


class Views(Protocol):
    """What each client holds, by its number."""

    def __len__(self) -> int:
        """How many clients there are."""

    def sizes(self, clients: Numbers) -> Numbers:
        """How many examples each of `clients` (k,) has, (k,); 0 is allowed."""

    def examples(self, client: int) -> Numbers:
        """The numbers of a client's examples, (n,), in the client's own order."""


@dataclass(frozen=True, eq=False)
class PartitionViews:
    """Clients that share the examples out: each example has one holder. `parts`: the examples of each client."""

    parts: Sequence[Tensor]

    def __len__(self) -> int:
        return len(self.parts)

    def sizes(self, clients: Numbers) -> Numbers:
        """See `Views`."""
        return np.array([len(self.parts[client]) for client in clients], dtype=np.int64)

    def examples(self, client: int) -> Numbers:
        """See `Views`."""
        numbers: Numbers = self.parts[client].numpy()
        return numbers


@dataclass(frozen=True)
class SampledViews:
    """Any number of clients, each with `examples_per_client` different examples that its number and `seed` decide.

    Nothing is held for a client: a million of them cost nothing until they take part. Clients share examples, so
    adding or removing one client is one client's view more or less, as for any other population; what an
    example-level guarantee says of an example holds for each of its copies by itself.

    >>> views = SampledViews(num_clients=10**6, num_examples=100, examples_per_client=3, seed=20731)
    >>> len(views), len(set(views.examples(999_999).tolist()))
    (1000000, 3)
    """

    num_clients: int
    num_examples: int
    examples_per_client: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_clients < 1:
            raise ValueError(f"num_clients must be at least 1, not {self.num_clients}")
        if not 1 <= self.examples_per_client <= self.num_examples:
            raise ValueError(
                f"examples_per_client must be in [1, {self.num_examples}], the number of examples, "
                f"not {self.examples_per_client}"
            )
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, not {self.seed}")

    def __len__(self) -> int:
        return self.num_clients

    def sizes(self, clients: Numbers) -> Numbers:
        """See `Views`."""
        return np.full(len(clients), self.examples_per_client, dtype=np.int64)

    def examples(self, client: int) -> Numbers:
        """See `Views`. The time depends on `examples_per_client` alone.

        Raises:
            ValueError: client is not in [0, num_clients).
        """
        if not 0 <= client < self.num_clients:
            raise ValueError(f"client must be in [0, {self.num_clients}), not {client}")
        count, each = self.num_examples, self.examples_per_client
        numbers: Numbers = sampled_indices(client, num_examples=count, examples_per_client=each, seed=self.seed).numpy()
        return numbers


def views_of(task: Task, data: DataConfig) -> Views:
    """What each client of a partition holds."""
    if data.examples_per_client is None:
        return PartitionViews(task_partition(task, data))
    return SampledViews(data.num_clients, len(task.train), data.examples_per_client, data.partition_seed)
