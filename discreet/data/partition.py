"""The examples of each client, and their division into training and held-out examples."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from discreet.data.examples import Task
from discreet.data.targets import Array
from discreet.privacy.owner_rows import rows_by_owner
from discreet.settings.data import SITE, DataConfig
from discreet.settings.rules import require_extra

Numbers = NDArray[np.int64]
_Parts = list[NDArray[Any]]
_SHARDS_PER_CLIENT = 2
SAMPLED = "sampled"
HOLDOUT_SEED = 20743  # public, as the rule is
BY_CLASS = ("dirichlet", "shards")


def partition_indices(
    targets: torch.Tensor,
    data: DataConfig,
    *,
    owners: torch.Tensor | None = None,
    sites: Array | None = None,
) -> list[torch.Tensor]:
    """The example numbers of each client, as int64 vectors: disjoint, not empty, together all of
    [0, n).

    targets: (n,) class numbers, or (n, k) labels, numbers or sequences. `data.partition_seed`
    decides the draw; "natural" draws nothing. `data.partition`:

    - "iid": shuffled and dealt; sizes differ by at most 1.
    - "dirichlet": each class is shared out in proportions from Dirichlet(alpha): small alpha,
      skewed clients
      (Hsu et al. 2019). A client that the draw leaves empty gets one example of the client that has
      most.
    - "shards": sorted by class and cut in equal shards, of which each client gets two at random
      (McMahan et
      al. 2017, section 3). If the examples do not divide, the rest makes more shards, a third for
      some.
    - "natural": by `owners`, (n,), in sorted order of the owner; num_clients must be the number of
      owners.
    - "owners": the owners are shuffled and dealt, each with all its rows.
    - "site": by `sites`, (n,), in their sorted order; an owner with rows at two of them is refused.

    Raises:
      ValueError: more clients than examples (twice as many for "shards"), a partition by classes of
        data that have none, owners that are missing, too few, or for "natural" of another
    number.
    """
    if data.num_clients > len(targets):
        raise ValueError(
            f"data.num_clients: {data.num_clients} clients cannot share {len(targets)} training "
            "examples"
        )
    if data.partition == "natural":
        parts = _natural(data, _rows_of_owners(data, owners))
    elif data.partition == "owners":
        parts = _dealt_owners(data, _rows_of_owners(data, owners))
    elif data.partition == SITE:
        parts = _by_site(data, sites, owners)
    elif data.partition == "iid":
        # The same split as flwr-datasets' IidPartitioner on shuffled data, without the seconds that
        # its import takes in every client process.
        order = np.random.default_rng(data.partition_seed).permutation(len(targets))
        parts = np.array_split(order, data.num_clients)
    elif data.partition in BY_CLASS and targets.ndim > 1:
        raise ValueError(
            f"data.partition: {data.partition} needs classes, and these data have none: use iid"
        )
    else:
        parts = _drawn(data, targets.numpy())
    return [torch.from_numpy(np.asarray(part, dtype=np.int64)) for part in parts]


@dataclass(frozen=True, eq=False)
class PartitionedExamples:
    """A partition of the examples among clients: the `rows` of all clients in order, and the start
    of each client's rows, (clients + 1,). `names`, (clients,): what `held_out_rows` draws for; None
    for the clients' own numbers."""

    rows: Numbers
    starts: Numbers
    names: Numbers | None = None

    @classmethod
    def of(cls, parts: Sequence[torch.Tensor], names: Numbers | None = None) -> Self:
        """The partition in which clients have the rows `parts`."""
        rows = torch.cat([torch.zeros(0, dtype=torch.int64), *parts])
        return cls(rows.numpy(), np.cumsum([0, *map(len, parts)], dtype=np.int64), names)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def sizes(self, clients: Numbers) -> Numbers:
        """The number of examples of each of `clients` (k,), (k,); 0 is allowed."""
        return self.starts[clients + 1] - self.starts[clients]

    def examples(self, client: int) -> Numbers:
        """The numbers of a client's examples, (n,), in the client's own order."""
        return self.rows[self.starts[client] : self.starts[client + 1]]

    def name(self, client: int) -> int:
        """The number that decides which examples a client holds out. It does not change with the
        other clients."""
        if self.names is None:
            return client
        return int(self.names[client])


@dataclass(frozen=True)
class SampledExamples:
    """Any number of clients, each with `examples_per_client` different examples that its number and
    a public `seed` decide. No client uses memory: a million clients cost nothing until they take
    part. Clients share examples, and an example-level guarantee holds for each copy of an example
    separately.

    >>> examples = SampledExamples(
    ...     num_clients=10**6, num_examples=5, examples_per_client=5, seed=20731
    ... )
    >>> len(examples), sorted(examples.examples(999_999).tolist())
    (1000000, [0, 1, 2, 3, 4])
    """

    num_clients: int
    num_examples: int
    examples_per_client: int
    seed: int

    def __len__(self) -> int:
        return self.num_clients

    def sizes(self, clients: Numbers) -> Numbers:
        return np.full(len(clients), self.examples_per_client, dtype=np.int64)

    def name(self, client: int) -> int:
        return client

    def examples(self, client: int) -> Numbers:
        """The computation time depends only on `examples_per_client`."""
        generator = np.random.Generator(
            np.random.Philox(key=np.array([self.seed, client], dtype=np.uint64))
        )
        return generator.choice(
            self.num_examples, self.examples_per_client, replace=False, shuffle=False
        )


ClientExamples = PartitionedExamples | SampledExamples


@lru_cache(maxsize=8)
def client_examples_of(task: Task, data: DataConfig) -> ClientExamples:
    """The training examples of each client, partitioned once per process for the same task
    object."""
    if data.examples_per_client is None:
        sites = None
        names = None
        if data.partition == "natural" and task.owners is not None:
            names = np.unique(task.owners.numpy())
        if data.site is not None:
            from discreet.data.cells import owner_numbers
            from discreet.data.site_column import sites_of

            sites = sites_of(task, data.site)
            names = owner_numbers(np.unique(np.asarray(sites)))
        parts = partition_indices(task.train.targets, data, owners=task.owners, sites=sites)
        return PartitionedExamples.of(parts, names)
    return SampledExamples(
        data.num_clients, len(task.train), data.examples_per_client, data.partition_seed
    )


def _rows_of_owners(data: DataConfig, owners: torch.Tensor | None) -> _Parts:
    """The rows of each owner, in sorted order of the owner."""
    if owners is None:
        raise ValueError(
            f"data.partition: {data.partition} needs data with owners, as femnist and a folder "
            "with owner in data.toml have; iid needs none"
        )
    return [rows.numpy() for rows in rows_by_owner(owners.numpy())]


def _natural(data: DataConfig, rows: _Parts) -> _Parts:
    # The same as NaturalIdPartitioner, without its progress bar on the terminal.
    if len(rows) != data.num_clients:
        owners_are = f"{len(rows)} for a natural partition, the number of owners"
        raise ValueError(
            f"data.num_clients must be {owners_are}, not {data.num_clients} (or "
            "data.partition=owners, which deals them to fewer; iid deals rows)"
        )
    return rows


def _dealt_owners(data: DataConfig, rows: _Parts) -> _Parts:
    if len(rows) < data.num_clients:
        raise ValueError(
            f"data.num_clients: {data.num_clients} clients cannot share {len(rows)} owners"
        )
    order = np.random.default_rng(data.partition_seed).permutation(len(rows))
    dealt = np.array_split(order, data.num_clients)
    return [np.sort(np.concatenate([rows[owner] for owner in part])) for part in dealt]


def _by_site(data: DataConfig, sites: Array | None, owners: torch.Tensor | None) -> _Parts:
    """The rows of each site, in sorted order of the site."""
    if sites is None:
        raise ValueError("data.site: the column must be in data.path, which is no folder here")
    parts = [rows.numpy() for rows in rows_by_owner(sites)]
    if len(parts) != data.num_clients:
        rule = f"{len(parts)} with data.site={data.site}, the number of its values"
        raise ValueError(f"data.num_clients must be {rule}, not {data.num_clients}")
    if owners is not None:
        pairs = {*zip(owners.tolist(), sites.tolist(), strict=True)}
        several = len(pairs) - len({owner for owner, _ in pairs})
        if several:
            raise ValueError(
                f"data.site: {several} owners have rows at two sites, where each would protect "
                "only its own"
            )
    return parts


def _drawn(data: DataConfig, targets: np.ndarray[Any, Any]) -> _Parts:
    """The partitions that flwr-datasets draws."""
    require_extra("datasets", "flwr_datasets", why=f"data.partition={data.partition}")
    from datasets import Dataset
    from flwr_datasets.partitioner import DirichletPartitioner, ShardPartitioner

    same: dict[str, Any] = {
        "num_partitions": data.num_clients,
        "partition_by": "target",
        "seed": data.partition_seed,
    }
    partitioner: DirichletPartitioner | ShardPartitioner
    if data.partition == "dirichlet":
        # With a larger minimum it redraws until it succeeds, which never happens with many clients.
        partitioner = DirichletPartitioner(alpha=float(data.alpha), min_partition_size=0, **same)
    else:
        shards = _SHARDS_PER_CLIENT * data.num_clients
        if shards > len(targets):
            few = f"{len(targets)} training examples are too few for {data.num_clients} clients"
            raise ValueError(
                f"data.num_clients: shards need {_SHARDS_PER_CLIENT} examples a client; {few}"
            )
        # Asked for two shards per client, it drops the remainder; given the size of a shard, it
        # assigns all examples.
        partitioner = ShardPartitioner(
            shard_size=len(targets) // shards, keep_incomplete_shard=True, **same
        )
    partitioner.dataset = Dataset.from_dict({"index": np.arange(len(targets)), "target": targets})
    with warnings.catch_warnings():
        # datasets sorts with an argument that pyarrow deprecates from 25 on; Discreet can't change
        # that.
        warnings.simplefilter("ignore", FutureWarning)
        parts = [
            np.asarray(partitioner.load_partition(client)["index"][:])
            for client in range(data.num_clients)
        ]
    _fill_empty(parts)
    return parts


def _fill_empty(parts: list[Any]) -> None:
    """Moves one example of the largest part to each that is empty."""
    for client in [number for number, part in enumerate(parts) if not len(part)]:
        largest = max(range(len(parts)), key=lambda number: len(parts[number]))
        parts[client], parts[largest] = parts[largest][:1], parts[largest][1:]


def held_out_rows(num_examples: int, name: int, *, share: float) -> torch.Tensor:
    """The held-out rows, ascending, (m,) int64, of a client with so many examples, which it never
    trains on and rates models on: one of every 1 / share consecutive rows, chosen by a public seed
    and the client's `name` alone: see `PartitionedExamples`.

    The choice does not depend on the values of examples, and rows added at the end do not change it
    for earlier rows, so a row that was trained on is never held out later. m differs from share *
    num_examples by less than 1; it may be 0 for fewer than 1 / share examples.

    >>> held_out_rows(20, 7, share=0.2).tolist() == held_out_rows(23, 7, share=0.2).tolist()[:4]
    True
    """
    edges = np.floor(np.arange(math.ceil(num_examples * share) + 1) / share)
    key = np.array([HOLDOUT_SEED, name], dtype=np.uint64)
    places = np.random.Generator(np.random.Philox(key=key)).random(len(edges) - 1)
    rows = (edges[:-1] + np.floor(places * np.diff(edges))).astype(np.int64)
    return torch.from_numpy(rows[rows < num_examples])


def split_rows(num_examples: int, name: int, *, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that a client trains on, and the rows that it holds out: both ascending, together
    all rows."""
    held = held_out_rows(num_examples, name, share=share)
    trained = torch.ones(num_examples, dtype=torch.bool)
    trained[held] = False
    return trained.nonzero().flatten(), held
