"""The units of protection of DP-SGD inside a client: single examples, or owners with all their
rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from discreet.data.examples import Examples
from discreet.per_example.objective import Loss
from discreet.per_example.per_example import clipped_gradient_sum, clipped_sum_by_owner
from discreet.privacy.owner_rows import OwnerRows, owner_rows
from discreet.privacy.private import Private
from discreet.privacy.randomness import RandomSource
from discreet.settings.adjacency import EXAMPLE
from discreet.settings.client_settings import ClientSettings


class Held(Protocol):
    """The examples of a client. A step reads some of them."""

    def __len__(self) -> int: ...
    @property
    def owners(self) -> Tensor | None: ...
    def subset(self, indices: Tensor) -> Examples: ...


@dataclass(frozen=True, eq=False, repr=False)
class Drawn(Private):
    """The rows of a Poisson batch, and the index of each row's unit, both (m,) int64."""

    rows: Tensor
    units: Tensor

    def only(self, kept: Tensor) -> Drawn:
        """The rows where `kept`, (m,) bool, is true."""
        return Drawn(self.rows[kept], self.units[kept])


@dataclass(frozen=True, eq=False)
class Units:
    """The units of one client. `owners`: the rows of each owner; None if each row is a unit."""

    examples: Held
    owners: OwnerRows | None = None

    def __len__(self) -> int:
        if self.owners is None:
            return len(self.examples)
        return len(self.owners)

    def drawn(self, units: Tensor, source: RandomSource) -> Drawn:
        """The batch of these units. If an owner has more rows than a step may read, a secret random
        set of them is drawn."""
        if self.owners is None:
            return Drawn(units, units)
        ((rows, owners),) = self.owners.pieces(units.tolist(), source, None)
        return Drawn(*(torch.tensor(numbers, dtype=torch.int64) for numbers in (rows, owners)))

    def first(self, count: int) -> Examples:
        """The examples of the first `count` units."""
        if self.owners is None:
            return self.examples.subset(torch.arange(count))
        rows = torch.cat([torch.zeros(0, dtype=torch.int64), *self.owners.rows[:count]])
        return self.examples.subset(rows.sort().values)

    def each(self, drawn: Drawn) -> Iterator[tuple[Tensor, Tensor]]:
        """The inputs and targets of each unit of a batch."""
        for unit in sorted(set(drawn.units.tolist())):
            rows = drawn.rows[drawn.units == unit]
            some = self.examples.subset(rows)
            yield some.inputs, some.targets

    def clipped_sum(
        self, model: nn.Module, drawn: Drawn, *, clip_norm: float, loss: Loss
    ) -> tuple[Tensor, Tensor]:
        """The sum of the units' clipped gradients, and their norms. The gradient of an owner is
        that of the mean loss over its drawn rows."""
        some = self.examples.subset(drawn.rows)
        if self.owners is None:
            return clipped_gradient_sum(
                model, some.inputs, targets=some.targets, clip_norm=clip_norm, loss=loss
            )
        batch = some.inputs, some.targets
        return clipped_sum_by_owner(model, batch, drawn.units, clip_norm=clip_norm, loss=loss)


def warning_of_rows(run: ClientSettings, examples: Examples) -> str:
    """A warning for a run that protects single rows although owners have several; else ""."""
    owners = examples.owners
    if owners is None or not run.gives(EXAMPLE) or run.example.by_owner:
        return ""
    if run.data.partition == "natural":  # each owner is a client
        return ""
    counts = Counter(owners.tolist()).values()
    several = sum(count > 1 for count in counts)
    if not several:
        return ""
    return (
        f"privacy.example protects single rows, and {several} of {len(counts)} owners "
        f"have several, up to {max(counts)}: privacy.example.unit=owner protects an owner "
        "with all its rows"
    )


def units_of(examples: Held, rows_per_owner: int | None) -> Units:
    """The units of a client with these examples: owners, each with at most `rows_per_owner` rows in
    a step, or with None single examples. Raises ValueError: the owners of the rows are not
    known."""
    if rows_per_owner is None:
        return Units(examples)
    if examples.owners is None:
        raise ValueError("owners: it is not known whose each example is")
    return Units(examples, owner_rows(examples.owners, len(examples), rows_per_owner))
