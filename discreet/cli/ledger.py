"""A run's ledgers, or a node's: `discreet ledger show|verify|export|create|adopt RUN`.

show    what was spent, for each guarantee and holder, with epsilon by each accountant
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

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from discreet.config import ConfigError
from discreet.federated.durable_ledger import DurableLedger, LedgerError
from discreet.federated.guarantees import GUARANTEES, USER
from discreet.federated.population_account import ADJACENCIES, LIMIT, Population, create_account, is_account
from discreet.federated.run_folder import CONFIG, RunFolder
from discreet.privacy.accounting import pure_epsilon
from discreet.privacy.events import ACCOUNTANTS, event_to_json
from discreet.privacy.privacy_ledger import PrivacyLedger

DEFAULT_DELTA = 1e-5


def ledgers_of(run: Path) -> list[DurableLedger]:
    """The ledger files of a run folder, or the one file that `run` is.

    Raises:
      LedgerError: there is none.
    """
    files = [run] if run.is_file() else [RunFolder(run).ledger_path, RunFolder(run).clients_ledger_path]
    paths = [path for path in files if path.exists()]
    if not paths:
        raise LedgerError(f"{run} holds no ledger")
    return [DurableLedger(path) for path in paths]


def show(run: Path, *, delta: float) -> None:
    """Prints what was spent, two lines for each guarantee and holder."""
    print(f"epsilon at delta {delta:g}")
    for ledger in ledgers_of(run):
        if is_account(ledger.facts()):
            show_account(ledger, delta=delta)
            continue
        for guarantee in GUARANTEES:
            for holder in ledger.holders(guarantee):
                spent = ledger.spent(guarantee, holder=holder)
                print(f"{guarantee}-level{f', client {holder}' if holder else ''}: {_events(spent)}")
                print(f"  {_epsilons(spent, delta)}")


def show_account(ledger: DurableLedger, *, delta: float) -> None:
    """Prints what each run over a population has cost, and all of them together."""
    facts = ledger.facts()
    print(f"population {facts['name']}: {facts['size']} clients, {facts['adjacency']}, delta {facts['delta']:g}")
    total, runs = PrivacyLedger(), list(dict.fromkeys(row.holder for row in ledger.releases()))
    for run in runs:
        spent = ledger.spent(USER, holder=run)
        total = PrivacyLedger((*total.entries, *spent.entries))
        print(f"run {run.rpartition(' ')[0]}: {_events(spent)}")
        print(f"  {_epsilons(spent, delta)}")
    limit = "" if facts[LIMIT] is None else f"; no run may pass {facts[LIMIT]:g}"
    print(f"all runs together ({len(runs)}): {total.num_releases} releases{limit}")
    print(f"  {_epsilons(total, delta)}")


def _events(spent: PrivacyLedger) -> str:
    return "; ".join(f"{count} x {in_words(json.loads(event_to_json(event)))}" for event, count in spent.entries)


def in_words(event: dict[str, Any]) -> str:
    """An event as a person says it.

    >>> in_words({"kind": "poisson_sampled", "sampling_probability": 0.3, "event": {"kind": "no_op"}})
    'nothing, Poisson-sampled with probability 0.3'
    """
    inner = in_words(event["event"]) if "event" in event else ""
    match event["kind"]:
        case "poisson_sampled":
            return f"{inner}, Poisson-sampled with probability {event['sampling_probability']:.4g}"
        case "sampled_without_replacement":
            return f"{inner}, {event['sample_size']} of {event['source_dataset_size']} sampled without replacement"
        case "self_composed":
            return f"{event['count']} times ({inner})"
        case "composed":
            return " and ".join(map(in_words, event["events"]))
        case "repeat_and_select":
            return f"one chosen from {event['mean']:g} on average of ({inner})"
        case "non_private":
            return "a release without noise"
        case "no_op":
            return "nothing"
        case kind:
            return f"{kind.capitalize()} of noise multiplier {event['noise_multiplier']:.4g}"


def _epsilons(spent: PrivacyLedger, delta: float) -> str:
    said = []
    for accountant in ACCOUNTANTS:
        try:
            said.append(f"epsilon {spent.epsilon(delta, accountant):.4g} by {accountant}")
        except ValueError:
            said.append(f"not accounted by {accountant}")
    pure = pure_epsilon(spent.entries)
    return ", ".join([*said, *([f"pure epsilon {pure:.4g}"] if math.isfinite(pure) else [])])


def verify(run: Path) -> int:
    """Prints whether each ledger's chain holds; 1 if one does not."""
    code = 0
    for ledger in ledgers_of(run):
        faults = ledger.verify()
        code = code or (1 if faults else 0)
        print(f"{ledger.path.name}: {'; '.join(faults) or f'{len(ledger.releases())} rows, the chain holds'}")
        print(f"  head {ledger.mark().head}")
    return code


def export(run: Path) -> None:
    """Prints every row as JSON."""
    for ledger in ledgers_of(run):
        for release in ledger.releases():
            row = dataclasses.asdict(release) | {"event": json.loads(release.event), "ledger": ledger.path.name}
            print(json.dumps(row, sort_keys=True))


def create(path: Path) -> None:
    """Makes a node's ledger."""
    print(f"{path}: nothing is spent yet; head {DurableLedger.create(path).mark().head}")


def create_for(path: Path, chosen: argparse.Namespace) -> None:
    """Makes the account of a population."""
    if chosen.size is None or chosen.delta is None:
        raise ConfigError("--size and --delta must be given with --population: whose account it is, for good")
    population = Population(chosen.population, chosen.size, ADJACENCIES[chosen.replace], chosen.delta)
    made = create_account(path, population, max_epsilon=chosen.max_epsilon)
    print(f"{path}: account of {chosen.population}, nothing is spent yet; head {made.mark().head}")


def adopt(run: Path) -> None:
    """Lets this machine go on with ledgers."""
    for ledger in ledgers_of(run):
        ledger.adopt()
        print(f"{ledger.path}: goes on here after {ledger.mark().rows} rows")


def _delta(run: Path, given: float | None) -> float:
    """The delta that was given, or the run's or the population's own; of another ledger `DEFAULT_DELTA`."""
    if given is not None:
        return given
    if run.is_file() and is_account(facts := DurableLedger(run).facts()):
        return float(facts["delta"])
    return RunFolder(run).read_config().privacy.delta if (run / CONFIG).exists() else DEFAULT_DELTA


def main(words: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="discreet ledger", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("action", choices=("show", "verify", "export", "create", "adopt"))
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--delta", type=float, help="of the epsilons shown; the run's own by default, else 1e-5")
    made = parser.add_argument_group("create, of the account of a population")
    made.add_argument("--population", metavar="NAME", help="its name, which runs give as sampling.population_name")
    made.add_argument("--size", type=int, help="how many clients it has")
    made.add_argument(
        "--replace", action="store_true", help="neighbours differ by replacing a client (sampling.kind=fixed)"
    )
    made.add_argument("--max-epsilon", type=float, help="no run may pass it, whatever its own max_epsilon is")
    chosen = parser.parse_args(words)
    try:
        if chosen.action == "verify":
            return verify(chosen.run)
        if chosen.action == "show":
            show(chosen.run, delta=_delta(chosen.run, chosen.delta))
        elif chosen.action == "create" and chosen.population is not None:
            create_for(chosen.run, chosen)
        else:
            {"export": export, "create": create, "adopt": adopt}[chosen.action](chosen.run)
    except (LedgerError, ValueError) as error:
        print(f"discreet: {error}", file=sys.stderr)
        return 2
    return 0
