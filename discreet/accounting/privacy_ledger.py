"""The account of one guarantee: an immutable value that grows by events."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from discreet.accounting.events import PLD, RDP, event_to_json, exceeds, releases_in

if TYPE_CHECKING:
    from dp_accounting import DpEvent


@dataclass(frozen=True)
class PrivacyLedger:
    """The releases one guarantee has made about the same data.

    ``entries`` holds each distinct event once, with how often it was released, in order of first
    appearance: composition does not depend on order. The epsilon holds under the adjacency of the
    events (see ``discreet.accounting.accounting``), for adaptively chosen releases.

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

    def facts(self) -> list[dict[str, object]]:
        """Each event, as JSON reads it, and how often it was released: what privacy.json lists."""
        return [
            {"event": json.loads(event_to_json(event)), "count": count}
            for event, count in self.entries
        ]

    def record(self, event: DpEvent, count: int = 1) -> PrivacyLedger:
        """The ledger after ``count`` more releases of an event. Raises ValueError: Discreet does
        not know the event."""
        return PrivacyLedger((*self.entries, (event, count)))

    def epsilon(self, delta: float, accountant: str = PLD) -> float:
        """The epsilon at ``delta`` of all releases together: 0 if there are none, inf if one had no
        noise."""
        # Imported here: a client that accounts nothing starts without dp_accounting, in half the
        # time.
        from discreet.accounting.accounting import epsilon_spent

        return epsilon_spent(self.entries, delta=delta, accountant=accountant)

    @property
    def num_releases(self) -> int:
        """The number of releases, rounded up; a choice among trials counts as often as it releases
        on average."""
        return math.ceil(math.fsum(count * releases_in(event) for event, count in self.entries))


@lru_cache(maxsize=65536)
def epsilon_of(spent: PrivacyLedger, delta: float, accountant: str) -> float:
    """`PrivacyLedger.epsilon`, computed once for all who have released the same. At delta 0 it is
    pure epsilon, infinity with Gaussian noise; with a masked sum, which the PLD does not know, it
    is by RDP."""
    if delta == 0:
        from discreet.accounting.accounting import pure_epsilon

        return pure_epsilon(spent.entries)
    masked = any(hasattr(event, "renyi_noise_multiplier") for event, _ in spent.entries)
    return spent.epsilon(delta, RDP if masked else accountant)


def exceeds_budget(
    spent: PrivacyLedger, budget: float | None, *, delta: float, accountant: str
) -> bool:
    """True if releases cost more than a budget, by more than rounding: the one check, for server,
    clients and `DPSGD`.

    None is no budget, and one of pure epsilon (delta 0) does not hold releases that have none.
    """
    if budget is None:
        return False
    epsilon = epsilon_of(spent, delta, accountant)
    return exceeds(epsilon, budget) and not (delta == 0 and epsilon == math.inf)
