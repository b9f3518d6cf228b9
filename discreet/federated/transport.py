"""How a round's cohort is asked: through Flower's grid, or in the same process. The algorithm does not see which."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from discreet.federated.cohort_sum import PartialSum
from discreet.federated.messages import Reply


class MessagesTooLarge(OSError):
    """The messages of a round do not fit what the server takes: nobody was asked, nothing is charged."""


@dataclass(frozen=True)
class Failure:
    """A client that was asked and gave no usable reply. It counts as zero; noise and denominator stay.

    kind: `refused` (its policy or budget), `malformed`, `error`, `late`. An `unaccounted` one did reply, and its update
    counts, but it reports an infinite epsilon where this run costs a finite one.
    """

    client: int
    kind: str
    reason: str


@dataclass(frozen=True, eq=False)
class Replies:
    """What several clients reply at once, from a simulation that trains them together and adds them up.

    Attributes:
      part: their part in the round's sum.
      epsilon_example, epsilon_local, epsilon_local_pure: the largest over these clients, by their own accounts.
    """

    part: PartialSum
    epsilon_example: float = 0.0
    epsilon_local: float = 0.0
    epsilon_local_pure: float = 0.0


class Exchange(Protocol):
    """Asks clients for their updates."""

    def members(self) -> Sequence[int]:
        """The clients that can be asked now."""

    def ask(
        self, *, round_number: int, params: Tensor, clip_norm: float, cohort: Sequence[int]
    ) -> Iterable[Reply | Replies | Failure]:
        """A reply or failure for each client of the cohort, as they come: never the whole cohort at once."""
