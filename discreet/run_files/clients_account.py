"""What virtual clients have spent by their own account, which a simulation keeps in its run
folder."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from discreet.accounting.events import RDP
from discreet.accounting.privacy_ledger import epsilon_of
from discreet.ledger.durable_ledger import DurableLedger
from discreet.mechanisms.mechanism import REPORTED
from discreet.planning.plan import Plan
from discreet.planning.state import State
from discreet.run_files.run_folder import RunFolder, run_ledger
from discreet.run_files.run_ledgers import whole


def spent_by_clients(folder: RunFolder, plan: Plan) -> dict[str, float]:
    """The largest epsilon of a client, for each guarantee of the run: as clients reported it up to
    the last checkpoint, or from the ledger of a simulation's clients. LedgerError: the checkpoint
    or the ledger is damaged, or the ledger is older than before or of another run."""
    reported = folder.reported()
    ledger = _ledger(folder)
    return {
        name: max(reported.get(name, 0.0), _largest_epsilon(ledger, name, plan, plan.run.delta))
        for name in plan.mechanisms
    }


def with_lost_rounds(state: State, plan: Plan, folder: RunFolder) -> State:
    """The state from which a run resumes, with the epsilons of rounds that are repeated: clients
    have paid for those too, and may not be asked again. In a federation they are known from
    metrics.csv only."""
    rows = folder.read_metrics()
    ledger = _ledger(folder)
    found = dict[str, Any]()
    for name in plan.mechanisms:
        for column, delta in zip(REPORTED[name], (plan.run.delta, 0.0), strict=False):
            said = [row.get(column) or 0.0 for row in rows]
            said += [getattr(state, column), _largest_epsilon(ledger, name, plan, delta)]
            found[column] = max((value for value in said if math.isfinite(value)), default=0.0)
    return replace(state, **found)


def _largest_epsilon(
    ledger: DurableLedger | None, guarantee: str, plan: Plan, delta: float
) -> float:
    """The epsilon of the account that has spent most, by the run's accountant; 0 without any."""
    if ledger is None:
        return 0.0
    spent = {*ledger.spent_by_each(guarantee).values()}
    if not spent:
        return 0.0
    # The bound that is quick for each of many clients ranks them.
    worst = max(spent, key=lambda each: epsilon_of(each, delta, RDP))
    return epsilon_of(worst, delta, plan.run.accountant)


def _ledger(folder: RunFolder) -> DurableLedger | None:
    """The ledger of a simulation's clients; None in a federation, whose clients keep their own.
    LedgerError: the ledger is damaged, older than before, or of another run."""
    if not folder.clients_ledger_path.exists():
        return None
    return whole(folder, run_ledger(folder.clients_ledger_path))
