"""What virtual clients have spent by their own account, which a simulation keeps in its run
folder."""

from __future__ import annotations

from collections import Counter

from discreet.accounting.events import RDP, event_from_json
from discreet.accounting.privacy_ledger import PrivacyLedger, epsilon_of
from discreet.ledger.durable_ledger import DurableLedger
from discreet.server.plan import Plan
from discreet.server.run_folder import RunFolder
from discreet.server.run_ledgers import whole


def largest_epsilon(folder: RunFolder, plan: Plan, guarantee: str) -> float:
    """The epsilon of the client that has spent most for a guarantee, by the run's accountant; 0 in
    a federation, whose clients keep their ledgers. LedgerError: the ledger is damaged, older than
    before, or of another run."""
    if not folder.clients_ledger_path.exists():
        return 0.0
    ledger = whole(folder, DurableLedger(folder.clients_ledger_path))
    spent = set(_by_client(ledger, guarantee))
    if not spent:
        return 0.0
    # The bound that is quick for each of many clients ranks them.
    worst = max(spent, key=lambda each: epsilon_of(each, plan.run.delta, RDP))
    return epsilon_of(worst, plan.run.delta, plan.run.accountant)


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
