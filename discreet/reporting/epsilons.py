"""The epsilons that a run has spent, from its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from discreet.accounting.privacy_ledger import epsilon_of
from discreet.mechanisms.mechanism import SERVER
from discreet.planning.plan import Plan
from discreet.run_files.clients_account import spent_by_clients
from discreet.run_files.run_folder import RunFolder
from discreet.run_files.run_ledgers import ledger_to_read


def spent_epsilons(
    folder: RunFolder, plan: Plan, rows: Sequence[Mapping[str, float | None]]
) -> dict[str, float]:
    """The epsilon of each guarantee of a run, by its own accountant; `rows` are those of
    metrics.csv.

    It is never less than in any row, in the last checkpoint, in the ledger of a simulation's
    clients, or in the server's ledger, which after a crash may have charged more: a changed digit
    in one of them can't lower it. Raises LedgerError: a ledger or the checkpoint is damaged.
    """
    found = spent_by_clients(folder, plan)
    for name in found:
        found[name] = max([found[name], *(row.get(f"epsilon_{name}") or 0.0 for row in rows)])
    if rows or folder.done() or folder.ledger_path.exists():
        # also where clients pay: it has the run's delta, which config.yaml has to have too
        ledger = ledger_to_read(folder, plan)
        for name, mechanism in plan.mechanisms.items():
            if SERVER in mechanism.charged_at:
                charged = epsilon_of(ledger.spent(name), plan.run.delta, plan.run.accountant)
                found[name] = max(found[name], charged)
    return found
