"""Who holds which training examples."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from typing import Any

import numpy as np
import torch

from discreet.tasks.examples import Examples, Task

_Parts = list[np.ndarray[Any, Any]]
_SHARDS_PER_CLIENT = 2
SAMPLED = "sampled"


@dataclass(frozen=True)
class Partition:
    """How training examples are dealt to clients; the same value always deals the same.

    kind: "iid", "dirichlet", "shards" or "natural" (see `partition_indices`), or "sampled" (see `sampled_indices`).
    alpha is read by "dirichlet" only, examples_per_client by "sampled". Raises ValueError where a setting is out of
    range.
    """

    num_clients: int
    kind: str
    seed: int
    alpha: float = 0.5
    examples_per_client: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in (*PARTITIONS, SAMPLED):
            known = ", ".join((*PARTITIONS, SAMPLED))
            raise ValueError(f"data.partition must be one of {known}, not {self.kind!r}")
        if self.num_clients < 1:
            raise ValueError(f"data.num_clients must be at least 1, not {self.num_clients}")
        if self.seed < 0:
            raise ValueError(f"data.partition_seed must be at least 0, not {self.seed}")
        if not (isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"data.alpha must be positive and finite, not {self.alpha}")
        if self.kind == SAMPLED and (self.examples_per_client is None or self.examples_per_client < 1):
            raise ValueError(f"data.examples_per_client must be at least 1, not {self.examples_per_client}")


def partition_indices(
    targets: torch.Tensor,
    num_clients: int,
    *,
    kind: str,
    alpha: float = 0.5,
    seed: int,
    owners: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """The example numbers of each client, int64 vectors: disjoint, none empty, together all of [0, n).

    targets: (n,) class numbers. `seed` decides the draw; "natural" draws nothing.

    - "iid": shuffled and dealt; sizes differ by at most 1.
    - "dirichlet": each class is shared out in proportions from Dirichlet(alpha): small alpha, skewed clients
      (Hsu et al. 2019). A client that the draw leaves empty gets one example of the client that has most.
    - "shards": sorted by class and cut in equal shards, of which each client gets two at random (McMahan et
      al. 2017, section 3). Where the examples do not divide, the rest makes more shards, a third for some.
    - "natural": by `owners`, (n,), in sorted order of the owner; num_clients must be the number of owners.

    Raises ValueError for more clients than examples (twice as many for "shards"), an unknown kind, alpha or
    seed out of range, and natural owners that are missing or of another number.
    """
    return _deal(targets, Partition(num_clients=num_clients, kind=kind, alpha=alpha, seed=seed), owners)


def client_examples(task: Task, partition: Partition, client_id: int) -> Examples:
    """The training examples of one client; client_id in [0, num_clients), else ValueError.

    The partition of a task is made once per process and then kept; a sampled view is made anew each time.
    """
    if not 0 <= client_id < partition.num_clients:
        raise ValueError(f"client_id must lie in [0, {partition.num_clients}), not {client_id}")
    if partition.kind == SAMPLED:
        assert partition.examples_per_client is not None
        count, each = len(task.train), partition.examples_per_client
        return task.train.subset(
            sampled_indices(client_id, num_examples=count, examples_per_client=each, seed=partition.seed)
        )
    return task.train.subset(task_partition(task, partition)[client_id])


def sampled_indices(client_id: int, *, num_examples: int, examples_per_client: int, seed: int) -> torch.Tensor:
    """Which of `num_examples` examples a client of a sampled population views: different ones, decided by its number
    and a public seed alone, (examples_per_client,) int64. Views of different clients may overlap.

    The time and memory are those of the view. Raises ValueError for more examples than there are.

    >>> sampled_indices(999_999, num_examples=5, examples_per_client=5, seed=20731).sort().values
    tensor([0, 1, 2, 3, 4])
    """
    if examples_per_client > num_examples:
        raise ValueError(
            f"data.examples_per_client: a view of {examples_per_client} of {num_examples} training examples"
        )
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, client_id], dtype=np.uint64)))
    return torch.from_numpy(generator.choice(num_examples, examples_per_client, replace=False, shuffle=False))


@lru_cache(maxsize=8)
def task_partition(task: Task, partition: Partition) -> tuple[torch.Tensor, ...]:
    """`partition_indices` of a task's training examples, made once per process for the same task object."""
    return tuple(_deal(task.train.targets, partition, task.owners))


def _deal(targets: torch.Tensor, partition: Partition, owners: torch.Tensor | None) -> list[torch.Tensor]:
    if partition.num_clients > len(targets):
        raise ValueError(
            f"data.num_clients: {partition.num_clients} clients cannot share {len(targets)} training examples"
        )
    parts = PARTITIONS[partition.kind](targets.numpy(), partition, None if owners is None else owners.numpy())
    return [torch.from_numpy(np.asarray(part, dtype=np.int64)) for part in parts]


def _iid(targets: Any, partition: Partition, owners: Any) -> _Parts:
    # The same split as flwr-datasets' IidPartitioner on shuffled data, without the seconds that its import
    # takes in every client process.
    return np.array_split(np.random.default_rng(partition.seed).permutation(len(targets)), partition.num_clients)


def _dirichlet(targets: Any, partition: Partition, owners: Any) -> _Parts:
    from flwr_datasets.partitioner import DirichletPartitioner

    partitioner = DirichletPartitioner(
        num_partitions=partition.num_clients,
        partition_by="target",
        alpha=float(partition.alpha),
        # With a larger minimum it draws again and again, and with many clients never succeeds.
        min_partition_size=0,
        seed=partition.seed,
    )
    return _fill_empty(_run_partitioner(partitioner, targets))


def _shards(targets: Any, partition: Partition, owners: Any) -> _Parts:
    from flwr_datasets.partitioner import ShardPartitioner

    shards = _SHARDS_PER_CLIENT * partition.num_clients
    if shards > len(targets):
        raise ValueError(
            f"data.num_clients: shards need {_SHARDS_PER_CLIENT} examples a client; {len(targets)} training "
            f"examples are too few for {partition.num_clients} clients"
        )
    # Asked for two shards a client it drops what does not divide; given the size of a shard it deals all.
    partitioner = ShardPartitioner(
        num_partitions=partition.num_clients,
        partition_by="target",
        shard_size=len(targets) // shards,
        keep_incomplete_shard=True,
        seed=partition.seed,
    )
    return _run_partitioner(partitioner, targets)


def _natural(targets: Any, partition: Partition, owners: Any) -> _Parts:
    # What NaturalIdPartitioner does, without its progress bar on the terminal.
    if owners is None:
        raise ValueError("data.partition: natural needs data with owners, as femnist and shakespeare have")
    _, numbers, counts = np.unique(owners, return_inverse=True, return_counts=True)
    if len(counts) != partition.num_clients:
        raise ValueError(
            f"data.num_clients must be {len(counts)} for a natural partition, the number of owners, "
            f"not {partition.num_clients}"
        )
    return np.split(np.argsort(numbers, kind="stable"), np.cumsum(counts)[:-1])


# The order is that of the documentation and of the error message.
PARTITIONS: dict[str, Callable[[Any, Partition, Any], _Parts]] = {
    "iid": _iid,
    "dirichlet": _dirichlet,
    "shards": _shards,
    "natural": _natural,
}


def _run_partitioner(partitioner: Any, targets: Any) -> _Parts:
    from datasets import Dataset

    partitioner.dataset = Dataset.from_dict({"index": np.arange(len(targets)), "target": targets})
    with warnings.catch_warnings():
        # datasets sorts with an argument that pyarrow calls deprecated from 25 on; not ours to change.
        warnings.simplefilter("ignore", FutureWarning)
        return [np.asarray(partitioner.load_partition(i)["index"][:]) for i in range(partitioner.num_partitions)]


def _fill_empty(parts: _Parts) -> _Parts:
    filled = list(parts)
    for client in (number for number, part in enumerate(parts) if len(part) == 0):
        largest = max(range(len(filled)), key=lambda number: len(filled[number]))
        filled[client], filled[largest] = filled[largest][:1], filled[largest][1:]
    return filled
