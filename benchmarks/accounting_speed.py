"""What asking for epsilon costs: the first time, and again after each further round.

    python -m benchmarks.accounting_speed

``first`` is the time of the first epsilon of a ledger in a fresh state, ``update`` the median time of
recording one more release and asking again, ``from scratch`` what dp_accounting's own accountant takes for
the same epsilon.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from dp_accounting import DpEvent, LaplaceDpEvent, NeighboringRelation
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from rich.console import Console
from rich.table import Table

from discreet.privacy.accountants import ACCOUNTANTS, PLD, RDP
from discreet.privacy.events import fixed_size_round_event, poisson_round_event
from discreet.privacy.privacy_ledger import PrivacyLedger

DELTA = 1e-5
UPDATES = 9


def rows() -> list[dict[str, Any]]:
    """One row for each kind of ledger and accountant, times in milliseconds."""
    return [_measure(name, ledger, accountant) for name, ledger, accountants in _cases() for accountant in accountants]


def _cases() -> list[tuple[str, PrivacyLedger, tuple[str, ...]]]:
    """Ledgers that share no event, so that none finds another's work done."""
    return [
        ("1 event, 100 rounds", _ledger([poisson_round_event(0.051, noise_multiplier=1.01)], 100), ACCOUNTANTS),
        (
            "1 event, 10,000 rounds",
            _ledger([poisson_round_event(0.0101, noise_multiplier=1.02)], 10_000),
            ACCOUNTANTS,
        ),
        (
            "1 event, 1,000,000 rounds",
            _ledger([poisson_round_event(0.00101, noise_multiplier=1.03)], 10**6),
            ACCOUNTANTS,
        ),
        (
            "20 events, 50 rounds each",
            _ledger([poisson_round_event(0.02 + i / 1000, noise_multiplier=1.04) for i in range(20)], 50),
            ACCOUNTANTS,
        ),
        ("100 Laplace events, once each", _ledger([LaplaceDpEvent(50.5 + i) for i in range(100)], 1), ACCOUNTANTS),
        (
            "everybody, 10,000 rounds",
            _ledger([poisson_round_event(1.0, noise_multiplier=40.5)], 10_000),
            ACCOUNTANTS,
        ),
        (
            "fixed cohort, 10,000 rounds",
            _ledger([fixed_size_round_event(101, population_size=10_007, noise_multiplier=2.1)], 10_000),
            (RDP,),
        ),
    ]


def _ledger(events: list[DpEvent], count: int) -> PrivacyLedger:
    return PrivacyLedger(tuple((event, count) for event in events))


def _measure(name: str, ledger: PrivacyLedger, accountant: str) -> dict[str, Any]:
    first, epsilon = _timed(lambda: ledger.epsilon(DELTA, accountant))
    updates = []
    for _ in range(UPDATES):
        ledger = ledger.record(ledger.entries[-1][0])
        updates.append(_timed(lambda ledger=ledger: ledger.epsilon(DELTA, accountant))[0])  # type: ignore[misc]
    scratch, theirs = _timed(lambda: _dp_accounting_epsilon(ledger, accountant))
    return {
        "ledger": name,
        "accountant": accountant,
        "epsilon": epsilon,
        "first_ms": first,
        "update_ms": median(updates),
        "from_scratch_ms": scratch,
        "relative_difference": ledger.epsilon(DELTA, accountant) / theirs - 1,
    }


def _timed(work: Callable[[], float]) -> tuple[float, float]:
    start = time.perf_counter()
    result = work()
    return 1000 * (time.perf_counter() - start), result


def _dp_accounting_epsilon(ledger: PrivacyLedger, accountant: str) -> float:
    replaces = any("WithoutReplacement" in type(event).__name__ for event, _ in ledger.entries)
    relation = NeighboringRelation.REPLACE_ONE if replaces else NeighboringRelation.ADD_OR_REMOVE_ONE
    theirs = PLDAccountant(relation) if accountant == PLD else RdpAccountant(neighboring_relation=relation)
    for event, count in ledger.entries:
        theirs.compose(event, count)
    return float(theirs.get_epsilon(DELTA))


def main() -> None:
    """Print the table."""
    table = Table(title=f"Epsilon at delta {DELTA:g}: milliseconds")
    for heading in (
        "ledger",
        "accountant",
        "epsilon",
        "first",
        "update",
        "dp_accounting from scratch",
        "difference",
    ):
        table.add_column(heading, justify="left" if heading in ("ledger", "accountant") else "right")
    for row in rows():
        times = (f"{row[key]:.1f}" for key in ("first_ms", "update_ms", "from_scratch_ms"))
        difference = f"{row['relative_difference']:+.0e}"
        table.add_row(row["ledger"], row["accountant"], f"{row['epsilon']:.4f}", *times, difference)
    Console().print(table)


if __name__ == "__main__":
    main()
