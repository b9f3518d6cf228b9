"""The rows of each owner of a data set, for a guarantee whose unit is an owner instead of a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from discreet.privacy.private import Private
from discreet.privacy.randomness import RandomSource


@dataclass(frozen=True, eq=False, repr=False)
class OwnerRows(Private):
    """The positions of each owner's rows. A step reads at most `most` of them, drawn at random."""

    rows: tuple[Tensor, ...]
    most: int

    def __len__(self) -> int:
        return len(self.rows)

    def drawn(self, owner: int, source: RandomSource) -> list[int]:
        """The rows of an owner that a step reads, ascending: all, or a uniformly random set of
        `most`."""
        rows = self.rows[owner]
        if len(rows) > self.most:
            rows = rows[
                source.child("owner", owner).permutation(len(rows))[: self.most].sort().values
            ]
        found: list[int] = rows.tolist()
        return found

    def pieces(
        self, owners: Sequence[int], source: RandomSource, most: int | None
    ) -> Iterator[tuple[list[int], list[int]]]:
        """The rows of some owners, and the owner of each row, in pieces of at most `most` rows. All
        rows of an owner are in one piece. There is at least one piece, which may be empty."""
        rows = list[int]()
        of = list[int]()
        for owner in owners:
            more = self.drawn(owner, source)
            if rows and most is not None and len(rows) + len(more) > most:
                yield rows, of
                rows = []
                of = []
            rows += more
            of += [owner] * len(more)
        yield rows, of


def owner_rows(owners: Sequence[object] | Tensor, count: int, most: int) -> OwnerRows:
    """The rows of each owner; `owners` names the owner of each of `count` rows. Raises ValueError:
    there are not `count` of them."""
    named = np.asarray(owners.tolist() if isinstance(owners, Tensor) else list(owners))
    if named.shape != (count,):
        raise ValueError(
            f"owners must be one for each of the {count} examples, not of shape {named.shape}"
        )
    return OwnerRows(rows_by_owner(named), most)


def rows_by_owner(owners: NDArray[Any]) -> tuple[Tensor, ...]:
    """The positions of each owner's rows, ascending, owners in sorted order; `owners` (n,) names
    the owner of each row."""
    _, numbers, sizes = np.unique(owners, return_inverse=True, return_counts=True)
    order = torch.from_numpy(np.argsort(numbers, kind="stable"))
    return torch.split(order, sizes.tolist())
