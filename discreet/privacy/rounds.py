"""How many rounds a budget has room for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from discreet.privacy.accountants import PLD
from discreet.privacy.privacy_ledger import PrivacyLedger

if TYPE_CHECKING:
    from dp_accounting import DpEvent

MAX_ROUNDS = 10_000_000


_NOTHING_SPENT = PrivacyLedger()


def rounds_within(
    max_epsilon: float,
    *,
    event: DpEvent,
    delta: float,
    accountant: str = PLD,
    spent: PrivacyLedger = _NOTHING_SPENT,
) -> int:
    """How many more releases of ``event`` fit after ``spent`` before the epsilon at ``delta`` passes
    ``max_epsilon``.

    0 if not one fits, or if ``spent`` has passed it already. The adjacency is that of the events.

    Raises:
        ValueError: a negative or undefined max_epsilon, more than MAX_ROUNDS that fit, or as
            ``epsilon_spent``.

    >>> from dp_accounting import LaplaceDpEvent
    >>> rounds_within(1.0, event=LaplaceDpEvent(10.0), delta=1e-9)
    10
    """
    if not max_epsilon >= 0.0:
        raise ValueError(f"max_epsilon must be at least 0, not {max_epsilon}")

    def fits(count: int) -> bool:
        return spent.record(event, count).epsilon(delta, accountant) <= max_epsilon

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        if high >= MAX_ROUNDS:
            raise ValueError(f"more than {MAX_ROUNDS} rounds of {event} fit within max_epsilon {max_epsilon}")
        low, high = high, min(2 * high, MAX_ROUNDS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
