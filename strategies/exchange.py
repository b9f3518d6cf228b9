"""How a round's cohort is asked: through Flower's grid, or in the same process. The algorithm does not see which."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from discreet.wire import Reply


@dataclass(frozen=True)
class Failure:
    """A client that was asked and gave no usable reply. It counts as zero; noise and denominator stay.

    kind: `refused` (its policy or budget), `malformed`, `error`, `late`.
    """

    client: int
    kind: str
    reason: str


class Exchange(Protocol):
    """Asks clients for their updates."""

    def members(self) -> Sequence[int]:
        """The clients that can be asked now."""

    def ask(
        self, *, round_number: int, params: Tensor, clip_norm: float, cohort: Sequence[int]
    ) -> Iterable[Reply | Failure]:
        """One reply or failure for each client of the cohort, as they come: never the whole cohort at once."""
