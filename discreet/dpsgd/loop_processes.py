"""One loop in several processes of torch.distributed: each works on its part of every batch, and there is one noise."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, distributed, nn

from discreet.ledger.budget import BudgetSpent
from discreet.ledger.rollback_guard import LedgerError
from discreet.privacy.randomness import RandomSource

Made = TypeVar("Made")


@dataclass(frozen=True)
class Processes:
    """A process among those of a loop, by default the only one. The first one, of rank 0, keeps the account and
    draws the noise. Sums without noise travel between them: whoever sees that network sees the data."""

    rank: int = 0
    count: int = 1

    def start(self, model: nn.Module, source: RandomSource) -> RandomSource:
        """Gives all the model of the first one. Returns the source of batches, which is the same for all."""
        if self.count == 1:
            return source
        for value in model.state_dict().values():
            distributed.broadcast(value, 0)
        # No seed that somebody chose: 32 bytes of the operating system, which no one but these processes knows.
        return RandomSource(self.first(lambda: os.urandom(32)), is_secure=False) if source.is_secure else source

    def part(self, positions: Sequence[int]) -> Sequence[int]:
        """The positions that this process reads: each belongs to one process."""
        return positions[self.rank :: self.count]

    def added(self, sums: list[Tensor]) -> list[Tensor]:
        """The sums of all processes together."""
        for value in sums if self.count > 1 else ():
            distributed.all_reduce(value)
        return sums

    def first(self, make: Callable[[], Made]) -> Made:
        """What `make` returns in the first process, in all of them; what the account refuses is refused in all."""
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
    """The processes of torch.distributed's default group, or this one alone."""
    return Processes(distributed.get_rank(), distributed.get_world_size()) if is_distributed else Processes()
