"""A process that charges a ledger. It imports little, because each test of several starts them
anew."""

from __future__ import annotations

from pathlib import Path

from dp_accounting import GaussianDpEvent

from discreet.ledger.durable_ledger import Charge, DurableLedger


def charge(path: Path, data_owner: str, times: int) -> None:
    """Charges a data owner so many times, one after the other."""
    ledger = DurableLedger(path)
    for number in range(times):
        ledger.charge([Charge(number, "example", data_owner, GaussianDpEvent(2.0))])
