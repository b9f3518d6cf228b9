"""The account of one guarantee: an immutable value that grows by events."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from discreet.privacy.events import PLD, event_to_json, releases_in

if TYPE_CHECKING:
    from dp_accounting import DpEvent


@dataclass(frozen=True)
class PrivacyLedger:
    """The releases one guarantee has made about the same data.

    ``entries`` holds each distinct event once, with how often it was released, in order of first appearance.
    Composition does not depend on order, so nothing is lost by merging. The epsilon holds under the adjacency
    of the events (see ``discreet.privacy.accounting``), for adaptively chosen releases.

    >>> from dp_accounting import GaussianDpEvent
    >>> ledger = PrivacyLedger().record(GaussianDpEvent(2.0)).record(GaussianDpEvent(2.0), count=3)
    >>> ledger.entries
    ((GaussianDpEvent(noise_multiplier=2.0), 4),)
    """

    entries: tuple[tuple[DpEvent, int], ...] = ()

    def __post_init__(self) -> None:
        merged: dict[str, tuple[DpEvent, int]] = {}
        for event, count in self.entries:
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise ValueError(f"count must be a whole number of at least 0, not {count!r}")
            text = event_to_json(event)
            if count:
                known, times = merged.get(text, (event, 0))
                merged[text] = known, times + count
        object.__setattr__(self, "entries", tuple(merged.values()))

    def record(self, event: DpEvent, count: int = 1) -> PrivacyLedger:
        """The ledger after ``count`` more releases of an event; 0 leaves it as it is.

        Raises:
            ValueError: an event that Discreet does not know, or a count that is negative or not whole.
        """
        return PrivacyLedger((*self.entries, (event, count)))

    def epsilon(self, delta: float, accountant: str = PLD) -> float:
        """The epsilon at ``delta`` of all releases together: 0 if there are none, inf if one had no noise.

        Raises:
            ValueError: as ``discreet.privacy.accounting.epsilon_spent``.
        """
        # Imported here: a client that accounts nothing starts without dp_accounting, in half the time.
        from discreet.privacy.accounting import epsilon_spent

        return epsilon_spent(self.entries, delta=delta, accountant=accountant)

    @property
    def num_releases(self) -> int:
        """The number of releases, rounded up; a choice among trials counts as often as it releases on average."""
        return math.ceil(math.fsum(count * releases_in(event) for event, count in self.entries))
