"""The account of one guarantee: an immutable list of events."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from discreet.accounting.events import (
    PLD,
    RDP,
    event_from_json,
    event_to_json,
    exceeds,
    releases_in,
)

if TYPE_CHECKING:
    from dp_accounting import DpEvent


@dataclass(frozen=True)
class PrivacyLedger:
    """The releases one guarantee has made about the same data.

    ``entries`` holds each distinct event once, with its number of releases, in order of first
    appearance: composition does not depend on order. The epsilon holds under the adjacency of the
    events (see ``discreet.accounting.accounting``), for adaptively chosen releases.

    >>> from dp_accounting import GaussianDpEvent
    >>> ledger = PrivacyLedger().record(GaussianDpEvent(2.0)).record(GaussianDpEvent(2.0), count=3)
    >>> ledger.entries
    ((GaussianDpEvent(noise_multiplier=2.0), 4),)
    """

    entries: tuple[tuple[DpEvent, int], ...] = ()
    # The entries as JSON: composed events have no hash.
    _texts: tuple[tuple[str, int], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        events: dict[str, DpEvent] = {}
        counts: dict[str, int] = {}
        for event, count in self.entries:
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise ValueError(f"count must be a whole number of at least 0, not {count!r}")
            text = event_to_json(event)
            if count:
                events.setdefault(text, event)
                counts[text] = counts.get(text, 0) + count
        entries = zip(events.values(), counts.values(), strict=True)
        object.__setattr__(self, "entries", tuple(entries))
        object.__setattr__(self, "_texts", tuple(counts.items()))

    def facts(self) -> list[dict[str, object]]:
        """Each event in JSON form with its number of releases, as privacy.json lists them."""
        return [
            {"event": json.loads(event_to_json(event)), "count": count}
            for event, count in self.entries
        ]

    def record(self, event: DpEvent, count: int = 1) -> PrivacyLedger:
        """The ledger after ``count`` more releases of an event. Raises ValueError for an event that
        Discreet does not know."""
        return PrivacyLedger((*self.entries, (event, count)))

    def epsilon(self, delta: float, accountant: str = PLD) -> float:
        """The epsilon at ``delta`` of all releases together: 0 if there are none, inf if one had no
        noise. It is computed once for all ledgers with the same releases."""
        return _epsilon(self._texts, delta, accountant)

    @property
    def num_releases(self) -> int:
        """The number of releases, rounded up; private selection counts with its mean number of
        releases."""
        return math.ceil(math.fsum(count * releases_in(event) for event, count in self.entries))


@lru_cache(maxsize=65536)
def _epsilon(texts: tuple[tuple[str, int], ...], delta: float, accountant: str) -> float:
    # Imported here, so that a client without an account starts in half the time, without
    # dp_accounting.
    from discreet.accounting.accounting import epsilon_spent

    entries = [(event_from_json(text), count) for text, count in texts]
    return epsilon_spent(entries, delta=delta, accountant=accountant)


def epsilon_of(spent: PrivacyLedger, delta: float, accountant: str) -> float:
    """`PrivacyLedger.epsilon`; at delta 0 the pure epsilon, which is infinite with Gaussian noise.
    With a secure sum, which the PLD does not know, RDP is used."""
    if delta == 0:
        from discreet.accounting.accounting import pure_epsilon

        return pure_epsilon(spent.entries)
    if any(hasattr(event, "renyi_noise_multiplier") for event, _ in spent.entries):
        accountant = RDP
    return _epsilon(spent._texts, delta, accountant)


def epsilon_of_blocks(spent: PrivacyLedger, delta: float, accountant: str) -> float:
    """`epsilon_of` for blocks that stay when a patient's data change: the larger of the charge and
    of what their sampled releases cost exactly, which no setting is known to put above it
    (`loss_distribution.ReplacedGaussianDpEvent`)."""
    from dp_accounting import PoissonSampledDpEvent

    from discreet.accounting.accounting import merged
    from discreet.accounting.loss_distribution import ReplacedGaussianDpEvent, composed_epsilon

    charged = epsilon_of(spent, delta, accountant)
    counts = merged(spent.entries)
    if not any(isinstance(event, PoissonSampledDpEvent) for event in counts):
        return charged
    exact = {
        ReplacedGaussianDpEvent(event.sampling_probability, event.event.noise_multiplier)
        if isinstance(event, PoissonSampledDpEvent)
        else event: count
        for event, count in counts.items()
    }
    return max(charged, composed_epsilon(exact, delta=delta))


def exceeds_budget(
    spent: PrivacyLedger, budget: float | None, *, delta: float, accountant: str
) -> bool:
    """True if releases cost more than a budget, by more than rounding. Server, clients and `DPSGD`
    all use this check.

    None means no budget. A budget of pure epsilon (delta 0) is exceeded by releases that have no
    pure epsilon.
    """
    if budget is None:
        return False
    epsilon = epsilon_of(spent, delta, accountant)
    return exceeds(epsilon, budget) and not (delta == 0 and epsilon == math.inf)
