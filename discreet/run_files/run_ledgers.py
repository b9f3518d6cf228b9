"""The ledgers of a run folder: made with the run, and checked against its other files before a run
resumes and before an epsilon is reported."""

from __future__ import annotations

from discreet.ledger.durable_ledger import DurableLedger, LedgerError
from discreet.ledger.rollback_guard import remove_database
from discreet.mechanisms.mechanism import SERVER
from discreet.planning.plan import Plan
from discreet.run_files.run_folder import CONFIG, RunFolder, run_ledger
from discreet.settings.adjacency import EXAMPLE, GUARANTEES, USER
from discreet.settings.rules import ConfigError

OF_GUARANTEES = tuple(f"privacy.{name}." for name in GUARANTEES)


def ledger_to_read(folder: RunFolder, plan: Plan) -> DurableLedger:
    """The server's ledger, to read its spending. Settings that an older version did not record
    in it are not compared. LedgerError: it is missing, damaged, older than before, of another run,
    or contradicts config.yaml. ConfigError: config.yaml has a target instead of the noise."""
    for name in (USER, EXAMPLE):
        charged = name in plan.mechanisms and SERVER in plan.mechanisms[name].charged_at
        if charged and getattr(plan.privacy, name).target_epsilon is not None:
            raise ConfigError(
                f"{folder.path / CONFIG} is damaged: the run's noise multiplier is missing"
            )
    was = whole(folder, run_ledger(folder.ledger_path)).facts()
    # What a guarantee costs has no default: a config.yaml without it has lost the guarantee.
    prices = dict.fromkeys(name for name in was if name.startswith(OF_GUARANTEES))
    noted = {**was, **prices, **plan.deciding}
    facts = {name: noted[name] for name in was}
    return run_ledger(folder.ledger_path, facts=facts)


def whole(folder: RunFolder, ledger: DurableLedger) -> DurableLedger:
    """A ledger of a run, to read of what was spent. LedgerError: it is damaged, older than this
    machine or the run's checkpoint knows it, or of another run."""
    ledger.whole()
    _check_position(folder, ledger)
    return ledger


def displaced(folder: RunFolder, ledger: DurableLedger) -> list[str]:
    """The fault of a ledger that lacks rows which it had at the run's last checkpoint; else empty.
    LedgerError: the checkpoint is damaged."""
    positions = folder.positions()
    position = positions.get(ledger.path.name)
    if not positions or (position is not None and ledger.contains(position)):
        return []
    return [
        "older than the checkpoint beside it, or belongs to another run: restore this run's ledger"
    ]


def _check_position(folder: RunFolder, ledger: DurableLedger) -> None:
    for fault in displaced(folder, ledger):
        raise LedgerError(f"{ledger.path} is {fault}")


def create_ledgers(folder: RunFolder, plan: Plan, *, simulated: bool) -> None:
    """Makes the ledgers of a new run: the server's, and that of virtual clients if they account
    for themselves. A run that was killed while it began may have left some without a row.
    LedgerError: there are some with rows already."""
    for path in (folder.ledger_path, folder.clients_ledger_path):
        if path.exists() and not DurableLedger(path).position().rows:
            remove_database(path)
    if simulated and plan.accounts_itself:
        DurableLedger.create(folder.clients_ledger_path)
    DurableLedger.create(folder.ledger_path, facts=plan.deciding)


def check_ledgers(folder: RunFolder, plan: Plan, *, simulated: bool) -> None:
    """Raises LedgerError, before a run is resumed, if a ledger is missing, damaged, made under
    other privacy settings or of another run, or if it is older than the checkpoint, metrics.csv, or
    this machine's own record of its charges."""
    ledgers = [folder.ledger(plan)]
    if simulated and plan.accounts_itself:
        ledgers.append(run_ledger(folder.clients_ledger_path))
    for ledger in ledgers:
        ledger.check()
        _check_position(folder, ledger)
    done = max((int(row["round"] or 0) for row in folder.read_metrics()), default=0)
    charged = ledgers[0].spent(USER).num_releases
    if USER in plan.mechanisms and charged < done:
        raise LedgerError(
            f"{folder.ledger_path} has {charged} releases for {done} rounds: restore a newer one"
        )
