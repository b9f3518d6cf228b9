"""A run's ledgers, or a node's: `discreet ledger show|verify|export|create|adopt RUN`.

show    what was spent, for each guarantee and data owner, with epsilon by each accountant
verify  whether any row was changed, inserted or deleted; exit code 1 if so
export  every row as JSON, one object a line
create  makes the ledger of a node: RUN is the file, which must not be there. With --population, --size and --delta
        it is the account of a population, which all runs over it charge (privacy.user.account=FILE); `show` then
        lists the runs and what each has cost
adopt   lets this machine go on with ledgers that it never charged, or that were moved. Adopt no copy of one that is
        charged elsewhere too: what the two spend is nowhere added up

RUN is a run folder, or a ledger file (a node's own, for instance).

examples:
  discreet ledger show outputs/first
  discreet ledger create node.db
  discreet ledger create people.db --population patients --size 200 --delta 1e-3
  discreet ledger show people.db
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Option

from discreet.accounting.accounting import pure_epsilon
from discreet.accounting.events import ACCOUNTANTS
from discreet.accounting.privacy_ledger import PrivacyLedger
from discreet.ledger.durable_ledger import DurableLedger, LedgerError
from discreet.server.population_account import ADJACENCIES, LIMIT, Population, create_account, is_account
from discreet.server.run_folder import CONFIG, RunFolder
from discreet.settings.privacy import GUARANTEES, USER
from discreet.settings.rules import ConfigError

DEFAULT_DELTA = 1e-5


def command(
    action: Annotated[Literal["show", "verify", "export", "create", "adopt"], typer.Argument()],
    run: Annotated[Path, typer.Argument(metavar="RUN")],
    delta: Annotated[float | None, Option(help="of the epsilons shown; the run's own by default, else 1e-5")] = None,
    population: Annotated[
        str | None, Option(metavar="NAME", help="create: the population, sampling.population_name of its runs")
    ] = None,
    size: Annotated[int | None, Option(help="of the population: how many clients it has")] = None,
    replace: Annotated[
        bool, Option("--replace", help="neighbours differ by replacing a client (sampling.kind=fixed)")
    ] = False,
    max_epsilon: Annotated[
        float | None, Option(help="no run over the population may pass it, whatever its own max_epsilon is")
    ] = None,
) -> int:
    """Does one action; 1 if `verify` finds a fault."""
    if action == "create":
        if population is None:
            ledger, whose = DurableLedger.create(run), ""
        elif size is None or delta is None:
            raise ConfigError("--size and --delta must be given with --population: whose account it is, for good")
        else:
            people = Population(population, size, ADJACENCIES[replace], delta)
            ledger, whose = create_account(run, people, max_epsilon=max_epsilon), f" account of {population},"
        print(f"{run}:{whose} nothing is spent yet; head {ledger.position().head}")
        return 0
    files = [run] if run.is_file() else [RunFolder(run).ledger_path, RunFolder(run).clients_ledger_path]
    ledgers = [DurableLedger(path) for path in files if path.exists()]
    if not ledgers:
        raise LedgerError(f"{run} holds no ledger")
    if action == "show":
        delta = _delta(run, ledgers[0]) if delta is None else delta
        print(f"epsilon at delta {delta:g}")
        for ledger in ledgers:
            (_show_account if is_account(ledger.facts()) else _show)(ledger, delta)
        return 0
    return max([{"verify": _verify, "export": _export, "adopt": _adopt}[action](ledger) for ledger in ledgers])


def _delta(run: Path, ledger: DurableLedger) -> float:
    """The run's or the population's own delta; of another ledger `DEFAULT_DELTA`."""
    if (run / CONFIG).exists():
        return RunFolder(run).read_config().privacy.delta
    return float(ledger.facts()["delta"]) if is_account(ledger.facts()) else DEFAULT_DELTA


def _show(ledger: DurableLedger, delta: float) -> None:
    for guarantee in GUARANTEES:
        for data_owner in ledger.data_owners(guarantee):
            spent = ledger.spent(guarantee, data_owner=data_owner)
            print(f"{guarantee}-level{f', client {data_owner}' if data_owner else ''}: {_spent(spent, delta)}")


def _show_account(ledger: DurableLedger, delta: float) -> None:
    """Prints the spending of each run over a population, and of all of them together."""
    facts = ledger.facts()
    print(f"population {facts['name']}: {facts['size']} clients, {facts['adjacency']}, delta {facts['delta']:g}")
    total, runs = PrivacyLedger(), list(dict.fromkeys(row.data_owner for row in ledger.releases()))
    for run in runs:
        spent = ledger.spent(USER, data_owner=run)
        total = PrivacyLedger((*total.entries, *spent.entries))
        print(f"run {run.rpartition(' ')[0]}: {_spent(spent, delta)}")
    limit = "" if facts[LIMIT] is None else f"; no run may pass {facts[LIMIT]:g}"
    print(f"all runs together ({len(runs)}): {total.num_releases} releases{limit}\n  {_epsilons(total, delta)}")


def _spent(spent: PrivacyLedger, delta: float) -> str:
    events = "; ".join(f"{count} x {event}" for event, count in spent.entries)
    return f"{events}\n  {_epsilons(spent, delta)}"


def _epsilons(spent: PrivacyLedger, delta: float) -> str:
    said = []
    for accountant in ACCOUNTANTS:
        try:
            said.append(f"epsilon {spent.epsilon(delta, accountant):.4g} by {accountant}")
        except ValueError:
            said.append(f"not accounted by {accountant}")
    pure = pure_epsilon(spent.entries)
    return ", ".join([*said, *([f"pure epsilon {pure:.4g}"] if math.isfinite(pure) else [])])


def _verify(ledger: DurableLedger) -> int:
    faults = ledger.verify()
    print(f"{ledger.path.name}: {'; '.join(faults) or f'{len(ledger.releases())} rows, the chain holds'}")
    print(f"  head {ledger.position().head}")
    return 1 if faults else 0


def _export(ledger: DurableLedger) -> int:
    for release in ledger.releases():
        row = dataclasses.asdict(release) | {"event": json.loads(release.event), "ledger": ledger.path.name}
        print(json.dumps(row, sort_keys=True))
    return 0


def _adopt(ledger: DurableLedger) -> int:
    ledger.adopt()
    print(f"{ledger.path}: goes on here after {ledger.position().rows} rows")
    return 0
