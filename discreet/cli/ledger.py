"""A run's ledgers, or a node's: `discreet ledger show|verify|export|create|adopt|backup RUN`.

RUN is a run folder, or a ledger file.

show    shows the spending of each guarantee and data owner, with epsilon by each accountant
verify  checks if any row was changed, inserted or deleted; exit code 1 if so
export  prints every row as JSON, one object a line
create  makes a node's ledger: RUN is the file, which must not exist. With --population, --size and
        --delta it is the account of a population, which all runs over it charge
        (privacy.user.account=FILE)
adopt   accepts ledgers that this machine never charged, or that were moved. Do not adopt a copy of
        a ledger that is charged elsewhere too: the spending of the two would not be added up
backup  copies a ledger file, also while it is in use, to the new file COPY, and verifies the copy.
        Keep the printed head digest: it proves later that no earlier row was rewritten

examples:
  discreet ledger show outputs/first
  discreet ledger create node.db
  discreet ledger create people.db --population patients --size 200 --delta 1e-3
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Option

from discreet.accounting.accounting import pure_epsilon
from discreet.accounting.events import ACCOUNTANTS
from discreet.accounting.privacy_ledger import PrivacyLedger
from discreet.ledger.durable_ledger import DurableLedger, LedgerError
from discreet.ledger.rollback_guard import RollbackGuard
from discreet.run_files.ledger_copy import copy_ledger
from discreet.run_files.run_folder import ACCOUNT, CONFIG, RunFolder
from discreet.run_files.run_ledgers import displaced
from discreet.server.population_account import (
    ADJACENCIES,
    LIMIT,
    Population,
    create_account,
    is_account,
)
from discreet.settings.rules import ConfigError, require

DEFAULT_DELTA = 1e-5
ANOTHER_BEFORE = (
    "warning: this machine knows another ledger there. What it says is still spent on the "
    "same data: put it back in place of the new one, unless the data are others"
)
ONLY_OF_POPULATIONS = (
    "--size, --delta, --replace and --max-epsilon go with --population; the limit of a node is "
    "max-epsilon in its policy"
)


def command(
    action: Annotated[
        Literal["show", "verify", "export", "create", "adopt", "backup"], typer.Argument()
    ],
    run: Annotated[Path, typer.Argument(metavar="RUN")],
    copy: Annotated[
        Path | None, typer.Argument(metavar="[COPY]", help="backup: the file to be made")
    ] = None,
    delta: Annotated[
        float | None, Option(help="of the epsilons shown; the run's own by default, else 1e-5")
    ] = None,
    population: Annotated[
        str | None, Option(metavar="NAME", help="create: sampling.population_name of its runs")
    ] = None,
    size: Annotated[int | None, Option(help="of the population: how many clients it has")] = None,
    replace: Annotated[
        bool, Option("--replace", help="neighbours differ by one client (sampling.kind=fixed)")
    ] = False,
    max_epsilon: Annotated[
        float | None, Option(help="no run over the population may exceed it")
    ] = None,
) -> int:
    """Does one action; exit code 1 if `verify` finds a fault."""
    require(delta is None or 0 < delta < 1, "--delta", "within (0, 1)", delta)
    if action == "create":
        if population is None:
            if replace or any(given is not None for given in (size, delta, max_epsilon)):
                raise ConfigError(ONLY_OF_POPULATIONS)
            people = None
        else:
            people = _people(population, size, delta=delta, replace=replace)
        _create(run, people, max_epsilon)
        return 0
    if action == "backup" and copy is None:
        raise ConfigError("backup needs a second file: the copy that is to be made")
    if action != "backup" and copy is not None:
        raise ConfigError("only backup takes a second file, the copy")
    if copy is not None:
        copied = copy_ledger(run, copy)
        print(f"{copy}: {copied.position().rows} rows, head {copied.position().head}")
        return 0
    ledgers = _ledgers_of(run)
    if action == "show":
        _show(run, ledgers, delta)
        return 0
    done = [ACTIONS[action](ledger, run) for ledger in ledgers]
    return int(not all(done))


def _create(file: Path, people: Population | None, max_epsilon: float | None) -> None:
    """Makes a node's ledger, or the account of a population."""
    _, is_another = RollbackGuard.known_here("", file)
    if people is None:
        ledger = DurableLedger.create(file)
        whose = ""
    else:
        ledger = create_account(file, people, max_epsilon=max_epsilon)
        whose = f" account of {people.name},"
    print(f"{file}:{whose} nothing is spent yet; head {ledger.position().head}")
    if is_another:
        print(ANOTHER_BEFORE)


def _ledgers_of(run: Path) -> list[DurableLedger]:
    """The ledgers of a run folder, or one that is a file. LedgerError: there are none."""
    if run.is_file():
        files = [run]
    else:
        files = [RunFolder(run).ledger_path, RunFolder(run).clients_ledger_path]
        _check_none_is_missing(run)
    ledgers = [DurableLedger(path) for path in files if path.exists()]
    if not ledgers:
        raise LedgerError(f"{run} holds no ledger: {files[0]} is missing")
    return ledgers


def _people(name: str, size: int | None, *, delta: float | None, replace: bool) -> Population:
    """The population whose account is made."""
    if size is None or delta is None:
        raise ConfigError(
            "--size and --delta must be given with --population: whose account it is, for good"
        )
    return Population(name, size, ADJACENCIES[replace], delta)


def _show(run: Path, ledgers: list[DurableLedger], delta: float | None) -> None:
    """Prints what ledgers have spent, if none of them has a fault."""
    if delta is None:
        delta = _delta_of(run, ledgers[0])
    print(f"epsilon at delta {delta:g}")
    for ledger in ledgers:
        ledger.whole()
        for fault in _displaced(run, ledger):
            raise LedgerError(f"{ledger.path} is {fault}")
    print(*(line for ledger in ledgers for line in _spending(ledger, delta)), sep="\n")


def _export(ledger: DurableLedger, _run: Path) -> bool:
    for row in ledger.releases():
        owned = asdict(row) | {"event": json.loads(row.event), "ledger": ledger.path.name}
        print(json.dumps(owned, sort_keys=True))
    return True


def _adopt(ledger: DurableLedger, _run: Path) -> bool:
    ledger.adopt()
    print(f"{ledger.path}: continues here after {ledger.position().rows} rows")
    return True


def _verify(ledger: DurableLedger, run: Path) -> bool:
    """False if it found a fault."""
    faults = ledger.verify() or ledger.lacking() or _displaced(run, ledger)
    if faults:
        said = "; ".join(faults)
    else:
        said = f"{ledger.position().rows} rows, the chain is intact"
    print(f"{ledger.path.name}: {said}")
    print(f"  head {ledger.position().head}")
    return not faults


# The action on each ledger of a run; it returns False if the ledger has a fault.
ACTIONS = {"export": _export, "adopt": _adopt, "verify": _verify}


def _check_none_is_missing(run: Path) -> None:
    """Raises LedgerError if the run's checkpoint knows a ledger that is not there."""
    known = list[str]()
    with suppress(LedgerError):  # a damaged checkpoint
        known += RunFolder(run).positions()
    for name in known:
        if name != ACCOUNT and not (run / name).exists():
            raise LedgerError(f"{run / name} is missing: put this run's ledger back")


def _displaced(run: Path, ledger: DurableLedger) -> list[str]:
    """The fault of a ledger that differs from the record in the run's checkpoint. A damaged
    checkpoint says nothing about a ledger."""
    with suppress(LedgerError):
        return displaced(RunFolder(run), ledger)
    return []


def _delta_of(run: Path, ledger: DurableLedger) -> float:
    """The delta of the run or the population; `DEFAULT_DELTA` for another ledger."""
    facts = ledger.facts()
    if "privacy.delta" in facts:
        return float(facts["privacy.delta"])
    if is_account(facts):
        return float(facts["delta"])
    if (run / CONFIG).exists():
        return RunFolder(run).read_config().privacy.delta
    return DEFAULT_DELTA


def _spending(ledger: DurableLedger, delta: float) -> Iterator[str]:
    """The spending of each guarantee and data owner; for an account, that of each run and of all
    runs together."""
    facts = ledger.facts()
    total = PrivacyLedger()
    account = is_account(facts)
    owners = dict.fromkeys((row.guarantee, row.data_owner) for row in ledger.releases())
    if account:
        yield (
            f"population {facts['name']}: {facts['size']} clients, {facts['adjacency']}, delta "
            f"{facts['delta']:g}"
        )
    for guarantee, owner in owners:
        spent = ledger.spent(guarantee, data_owner=owner)
        if account:
            whose = f"run {owner.rpartition(' ')[0]}"
        else:
            whose = f"{guarantee}-level" + f", client {owner}" * bool(owner)
        yield f"{whose}: {'; '.join(f'{count} x {event}' for event, count in spent.entries)}"
        yield f"  {_epsilons(spent, delta)}"
        total = PrivacyLedger((*total.entries, *spent.entries))
    if account:
        if facts[LIMIT] is None:
            limit = ""
        else:
            limit = f"; no run may exceed {facts[LIMIT]:g}"
        yield f"all runs together ({len(owners)}): {total.num_releases} releases{limit}"
        yield f"  {_epsilons(total, delta)}"


def _epsilons(spent: PrivacyLedger, delta: float) -> str:
    said = []
    for accountant in ACCOUNTANTS:
        try:
            said.append(f"epsilon {spent.epsilon(delta, accountant):.4g} by {accountant}")
        except ValueError:
            said.append(f"not accounted by {accountant}")
    pure = pure_epsilon(spent.entries)
    return ", ".join(said) + f", pure epsilon {pure:.4g}" * math.isfinite(pure)
