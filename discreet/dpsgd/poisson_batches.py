"""Poisson batches of a data set, to which each example belongs independently of the others; and the
processes of torch.distributed, if a loop has several: each works on its part of every batch, and
there is one noise."""

from __future__ import annotations

import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, distributed, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)

from discreet.dpsgd.one_index import check_one_index
from discreet.ledger.budget import BudgetSpent
from discreet.ledger.charges import LedgerError
from discreet.per_example.graphs import Graphs
from discreet.per_example.objective import Tree, as_tree, batches_in, rows_of
from discreet.privacy.owner_rows import OwnerRows
from discreet.privacy.private import Private
from discreet.privacy.randomness import RandomSource
from discreet.privacy.step_draws import step_batch

if TYPE_CHECKING:
    from discreet.dpsgd.item_draws import OwnSeeds
    from discreet.dpsgd.padding import PaddingTrial

_WORKERS = (
    "num_workers",
    "prefetch_factor",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
)
_log = logging.getLogger("discreet")
Batch = tuple[Tree, Tree]  # inputs and targets; targets are None if an example has none
Collate = Callable[[list[Any]], Any]
Made = TypeVar("Made")


class MapDataset(Protocol):
    """A map-style data set of PyTorch, or a list; an example is a pair (input, target)."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, eq=False, repr=False)
class Piece(Private):
    """A part of a step's batch, or all of it. `as_drawn` is a copy, since some writes to a tensor
    can't be detected otherwise, and since a forward may write to it, while rows of `batch` may
    share memory with a buffer of a collate_fn. `rows`: the positions of the examples in the data
    set. `owners`: the owner of each row, for a loop whose units are owners."""

    step: int
    number: int
    is_last: bool
    rows: Tensor
    owners: Tensor | None
    batch: Batch
    as_drawn: Batch


def _watched(dataset: MapDataset) -> Any:
    """A data set that reads its items by itself, watched at each of them."""
    from discreet.dpsgd.item_watch import ItemWatch  # rows of tensors need none

    return ItemWatch(dataset)


@dataclass(frozen=True, eq=False)
class ExampleReader:
    """Reads a data set by lists of positions. The results are tensors with the examples in their
    first dimension, or tuples and dictionaries of them, made by `collate`, or by PyTorch's
    default_collate if that is None. Raises ValueError if there are no examples, the data set has no
    length or no index, `collate` mixes examples, or an item is made from several."""

    dataset: MapDataset
    collate: Collate | None
    _items: Any = field(init=False)
    _count: int = field(init=False)

    def __post_init__(self) -> None:
        data = self.dataset
        if isinstance(data, Tensor):
            raise ValueError(
                "dataset: a tensor has no targets: give TensorDataset(inputs, targets)"
            )
        if isinstance(data, IterableDataset) or not (
            hasattr(data, "__len__") and hasattr(data, "__getitem__")
        ):
            raise ValueError("dataset must be map-style, with len(dataset) and dataset[index]")
        if len(data) < 1:
            raise ValueError("dataset must have at least one example")
        object.__setattr__(self, "_count", len(data))
        object.__setattr__(self, "_items", data if self._is_table else _watched(data))
        if self.collate is not None:
            from discreet.dpsgd.own_example import check_collate  # default_collate mixes nothing

            check_collate(self.joined, self._items)

    def __len__(self) -> int:
        """The number of examples. Raises ValueError: it is another than at first."""
        if len(self.dataset) != self._count:
            raise ValueError(
                f"dataset: it had {self._count} examples when the loop was made, and the sampling "
                f"is accounted for those; now it has {len(self.dataset)}"
            )
        return self._count

    def check_items(self, owners: Sequence[object] | None) -> None:
        """Raises ValueError if an example stands at several indices, of different owners, given by
        their keys. Copies of rows are logged. From now on items of one owner may share rows."""
        check_one_index(self.dataset, owners)
        if isinstance(self.dataset, TensorDataset) and self._is_table and owners is None:
            from discreet.dpsgd.row_copies import say_copies

            say_copies(self.dataset.tensors)
        elif not self._is_table:
            from discreet.dpsgd.own_example import check_nothing_left

            self._items.owners = owners
            self._items.join = self.joined
            check_nothing_left(self.dataset, owners, self.joined)

    @property
    def _is_table(self) -> bool:
        """True if items are rows of tensors. A class of the user's own may make them anew."""
        kind = type(self.dataset)
        is_plain = (
            kind.__getitem__ is TensorDataset.__getitem__ and kind.__len__ is TensorDataset.__len__
        )
        return is_plain and self.collate is None

    def seeds(self, source: RandomSource, process: int) -> Iterator[OwnSeeds | None]:
        """The seeds of a step's pieces; None for rows of tensors, which draw nothing."""
        if self._is_table:
            return itertools.repeat(None)
        from discreet.dpsgd.item_draws import seeds_of_pieces

        return seeds_of_pieces(source.child("items"), process)

    def __getitem__(self, asked: tuple[Sequence[int], OwnSeeds | None]) -> Batch:
        positions, seeds = asked
        if isinstance(self.dataset, TensorDataset) and self._is_table:
            parts = [
                part[torch.tensor(positions, dtype=torch.int64, device=part.device)]
                for part in self.dataset.tensors
            ]
            return _checked(
                parts if len(parts) == 2 else [tuple(parts[:-1]), parts[-1]], len(positions)
            )
        # An empty batch has the shapes and types of a batch of one.
        from discreet.dpsgd.item_draws import generators_kept

        assert seeds is not None
        with generators_kept():
            examples = seeds.read(self._items, positions or [0])
            inputs, targets = seeds.joined(self.joined, examples)
        return rows_of(inputs, slice(0, len(positions))), rows_of(targets, slice(0, len(positions)))

    def joined(self, examples: list[Any]) -> Batch:
        """A batch of examples that were read."""
        return _checked((self.collate or default_collate)(examples), len(examples))


@dataclass(frozen=True, eq=False, repr=False)
class PoissonBatches(Private):
    """Poisson batches on the device of `model`. Each process reads its part in pieces of at most
    `most` examples.

    An example, or with `owners` an owner, is in a batch with `probability`, independently of the
    others and of earlier batches. So a batch may have any size, 0 included. A step's batch is
    `drawn` once, however often it is read. `how`: arguments of torch's DataLoader.
    """

    examples: ExampleReader
    probability: float
    model: nn.Module
    source: RandomSource
    processes: Processes
    most: int | None
    how: Mapping[str, Any]
    owners: OwnerRows | None = None
    drawn: dict[int, Tensor] = field(default_factory=dict)

    @cached_property
    def padding(self) -> PaddingTrial | None:
        """The trial of padding; None without a collate_fn."""
        if self.examples.collate is None:
            return None
        from discreet.dpsgd.padding import PaddingTrial

        return PaddingTrial(self.examples.dataset, self.examples.joined)

    def pieces(self, steps: range) -> Iterator[Piece]:
        """The pieces of the batches of some steps. Workers read later ones ahead."""
        asked = deque[tuple[int, int, bool, Tensor, Tensor | None]]()

        def positions() -> Iterator[tuple[Sequence[int], OwnSeeds | None]]:
            for step in steps:
                mine = self.processes.part(self._positions(step))
                parts = list(self._parts(mine, step))
                seeds = self.examples.seeds(self.source.child("step", step), self.processes.rank)
                for number, (rows, owners) in enumerate(parts):
                    places = torch.tensor(rows, dtype=torch.int64)
                    asked.append((step, number, number == len(parts) - 1, places, owners))
                    yield rows, next(seeds)

        generator = torch.Generator().manual_seed(int(self.source.child("workers").words(1)[0]))
        whole: Any = self.examples  # indexed by lists of positions, so torch does not batch again
        how = {
            "batch_size": None,
            "sampler": positions(),
            "collate_fn": _as_it_is,
            "generator": generator,
            **self.how,
        }

        def piece(read: Batch) -> Piece:
            device = next(self.model.parameters()).device  # the model may have been moved
            batch = tree_map(lambda part: part if part is None else part.to(device), read)
            copy = tree_map(lambda part: part if part is None else part.clone(), batch)
            step, number, is_last, rows, owners = asked.popleft()
            owners = owners if owners is None else owners.to(device)
            return Piece(step, number, is_last, rows, owners, batch, copy)

        # Not a generator, which would hold a piece while the next one is read.
        return map(piece, DataLoader(whole, **how))

    def _parts(
        self, mine: Sequence[int], step: int
    ) -> Iterator[tuple[Sequence[int], Tensor | None]]:
        """The rows of each piece, and their owners; an empty batch is one piece."""
        if self.owners is not None:
            for rows, of in self.owners.pieces(
                mine, self.source.child("step", step).child("rows"), self.most
            ):
                yield rows, torch.tensor(of, dtype=torch.int64)
            return
        size = self.most or max(1, len(mine))
        for start in range(0, max(1, len(mine)), size):
            yield mine[start : start + size], None

    def _positions(self, step: int) -> Sequence[int]:
        """The draw of a step: positions of examples, or numbers of owners."""
        if step not in self.drawn:
            count = len(self.examples)  # refuses a number that has changed, for owners too
            if self.owners is not None:
                count = len(self.owners)
            self.drawn[step] = step_batch(self.source, step, count, probability=self.probability)
        positions: list[int] = self.drawn[step].tolist()
        return positions


def loaded(
    dataset: MapDataset | DataLoader[Any], collate: Collate | None
) -> tuple[ExampleReader, dict[str, Any]]:
    """The examples of a data set or a DataLoader, and the loader's options for workers and
    prefetching. Raises ValueError: examples can't be indexed, or the loader makes no batches or
    leaves examples out."""
    if not isinstance(dataset, DataLoader):
        return ExampleReader(dataset, collate), {}
    inner = cast(Any, dataset.dataset)
    sampler = dataset.sampler
    batches = dataset.batch_sampler
    if batches is None:
        raise ValueError(
            "dataset: a DataLoader with batch_size=None makes no batches: give its data set itself"
        )
    if isinstance(sampler, SubsetRandomSampler):
        raise ValueError(
            "dataset: SubsetRandomSampler leaves examples out: give it a torch.utils.data.Subset "
            "instead"
        )
    if dataset.collate_fn is default_collate:
        own = None
    else:
        own = dataset.collate_fn
    reader = ExampleReader(inner, collate or own)
    if type(batches) is BatchSampler:
        replaced = sampler
    else:
        replaced = batches
    said = "DPSGD replaces %s by Poisson batches of all %d examples of the DataLoader"
    _log.warning(said, type(replaced).__name__, len(inner))
    size = dataset.batch_size
    if size is None and type(batches) is BatchSampler:  # as a loader of accelerate's prepare
        size = batches.batch_size
    how = {name: getattr(dataset, name) for name in ("pin_memory", *_WORKERS)}
    return reader, {"batch_size": size, **how}


def _as_it_is(batch: Batch) -> Batch:
    return batch


def _checked(batch: Any, count: int) -> Batch:
    """A batch as (inputs, targets); a tensor, or tensors by name, are inputs alone."""
    is_pair = isinstance(batch, tuple | list)
    inputs, targets = batch if is_pair and len(batch) == 2 else (None if is_pair else batch, None)
    inputs = as_tree(inputs)
    if targets is not None:
        targets = as_tree(targets)
    parts = batches_in((inputs, () if targets is None else targets))
    is_empty = inputs is None or not batches_in(inputs)
    if is_empty or not all(isinstance(part, Tensor | Graphs) for part in parts):
        raise ValueError(
            "dataset: an example must be a pair, an input and a target, or tensors by name"
        )
    if any((isinstance(part, Tensor) and part.dim() == 0) or len(part) != count for part in parts):
        shapes = " and ".join(str(tuple(part.shape)) for part in tree_leaves(parts))
        if isinstance(inputs, tuple):
            shapes += ". Graphs of two nodes in all look like two rows: give graphs by name"
        raise ValueError(
            f"collate_fn: a batch of {count} examples must have as many rows (pad lists of several "
            f"sizes, and mask the padding in the loss), not shapes {shapes}"
        )
    return inputs, targets


@dataclass(frozen=True)
class Processes:
    """A process among those of a loop, by default the only one. The first one, of rank 0, keeps the
    account and draws the noise. Sums without noise travel between the processes, so an observer of
    that network can see the data."""

    rank: int = 0
    count: int = 1

    def start(self, model: nn.Module, source: RandomSource) -> RandomSource:
        """Copies the first process's model to all. Returns the source of batches, which is the same
        for all."""
        if self.count == 1:
            return source
        for value in model.state_dict().values():
            distributed.broadcast(value, 0)
        # The key is not a chosen seed but 32 bytes from the operating system, which only these
        # processes know.
        if source.is_secure:
            return RandomSource(self.first(lambda: os.urandom(32)), is_secure=False)
        return source

    def part(self, positions: Sequence[int]) -> Sequence[int]:
        """The positions that this process reads. Each position belongs to one process."""
        return positions[self.rank :: self.count]

    def added(self, sums: list[Tensor]) -> list[Tensor]:
        """The sums of all processes together."""
        for value in sums if self.count > 1 else ():
            distributed.all_reduce(value)
        return sums

    def first(self, make: Callable[[], Made]) -> Made:
        """Gives all processes the result of `make` in the first one; a refusal by its account is
        raised in all."""
        if self.count == 1:
            return make()
        held: list[Any] = [None, None]
        if self.rank == 0:
            try:
                held[0] = make()
            except (BudgetSpent, LedgerError) as error:
                held[1] = error
        distributed.broadcast_object_list(held, 0)
        if held[1] is not None:
            raise held[1]
        made: Made = held[0]
        return made


def processes_of(is_distributed: bool) -> Processes:
    """The processes of torch.distributed's default group, or this one alone, with a warning."""
    if is_distributed:
        return Processes(distributed.get_rank(), distributed.get_world_size())
    together = distributed.is_available() and distributed.is_initialized()
    if together and distributed.get_world_size() > 1:
        _log.warning(
            "torch.distributed has other processes, and this loop works alone: loops over the same "
            "data cost more together than one says. LoopPrivacy(distributed=True) makes one of all"
        )
    return Processes()
