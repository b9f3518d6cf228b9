"""What the durable ledger costs a round: writing a charge to disk, and reading epsilon back after many rounds."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from discreet.federated.durable_ledger import Charge, DurableLedger
from discreet.privacy.accountants import ACCOUNTANTS
from discreet.privacy.events import poisson_round_event

DELTA = 1e-5
ROUNDS = 10_000


def rows(rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """One row for each step of a round's bookkeeping: what, milliseconds."""
    event = poisson_round_event(0.01, noise_multiplier=1.0)
    with tempfile.TemporaryDirectory() as folder:
        ledger = DurableLedger.create(Path(folder) / "ledger.db")
        found = [_row("charge one round, flushed to disk", lambda: ledger.charge([Charge(1, "user", "", event)]))]
        many = [Charge(number, "user", "", event) for number in range(2, rounds + 1)]
        found.append(_row(f"charge {len(many)} rounds in one transaction", lambda: ledger.charge(many)))
        for accountant in ACCOUNTANTS:
            spent = ledger.spent("user").record(event)
            spent.epsilon(DELTA, accountant)
            what = f"read {rounds} rounds and their epsilon, {accountant}"
            found.append(_row(what, lambda name=accountant: ledger.spent("user").epsilon(DELTA, name)))  # type: ignore[misc]
        found.append(_row(f"verify {rounds} rows", ledger.verify))
    return found


def _row(what: str, work: Callable[[], object]) -> dict[str, Any]:
    start = time.perf_counter()
    work()
    return {"what": what, "ms": 1000 * (time.perf_counter() - start)}
