"""What virtual clients have spent by their own account, which a simulation keeps in its run
folder."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

from discreet.accounting.events import RDP, event_from_json
from discreet.accounting.privacy_ledger import PrivacyLedger, epsilon_of
from discreet.ledger.durable_ledger import DurableLedger
from discreet.mechanisms.mechanism import REPORTED
from discreet.planning.plan import Plan
from discreet.planning.state import State
from discreet.run_files.run_folder import RunFolder
from discreet.run_files.run_ledgers import whole


def largest_epsilon(
    folder: RunFolder, plan: Plan, guarantee: str, *, delta: float | None = None
) -> float:
    """The epsilon of the client that has spent most for a guarantee, by the run's accountant at its
    delta, or at another one; 0 in a federation, whose clients keep their ledgers. LedgerError: the
    ledger is damaged, older than before, or of another run."""
    if not folder.clients_ledger_path.exists():
        return 0.0
    ledger = whole(folder, DurableLedger(folder.clients_ledger_path))
    spent = set(_by_client(ledger, guarantee))
    if not spent:
        return 0.0
    if delta is None:
        delta = plan.run.delta
    # The bound that is quick for each of many clients ranks them.
    worst = max(spent, key=lambda each: epsilon_of(each, delta, RDP))
    return epsilon_of(worst, delta, plan.run.accountant)


def with_lost_rounds(state: State, plan: Plan, folder: RunFolder) -> State:
    """The state from which a run resumes, with the epsilons of rounds that are repeated: clients
    have paid for those too, and may not be asked again. In a federation they are known from
    metrics.csv only."""
    rows = folder.read_metrics()
    found = dict[str, Any]()
    for name in plan.mechanisms:
        for column, delta in zip(REPORTED[name], (None, 0.0), strict=False):
            said = [row.get(column) or 0.0 for row in rows]
            said += [getattr(state, column), largest_epsilon(folder, plan, name, delta=delta)]
            found[column] = max((value for value in said if math.isfinite(value)), default=0.0)
    return replace(state, **found)


def _by_client(ledger: DurableLedger, guarantee: str) -> list[PrivacyLedger]:
    found: dict[str, Counter[str]] = {}
    for row in ledger.releases():
        if row.guarantee == guarantee:
            found.setdefault(row.data_owner, Counter())[row.event] += row.count
    return [
        PrivacyLedger(
            tuple((event_from_json(text), count) for text, count in sorted(events.items()))
        )
        for events in found.values()
    ]
