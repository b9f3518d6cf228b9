"""A run's ledgers, or a node's: `discreet ledger show|verify|export|create|adopt RUN`.

show    what was spent, for each guarantee and holder, with epsilon by each accountant
verify  whether any row was changed, inserted or deleted; exit code 1 if so
export  every row as JSON, one object a line
create  makes the ledger of a node: RUN is the file, which must not be there
adopt   lets this machine go on with ledgers that it never charged, or that were moved. Adopt no copy of one that is
        charged elsewhere too: what the two spend is nowhere added up

RUN is a run folder, or a ledger file (a node's own, for instance).

examples:
  discreet ledger show outputs/first
  discreet ledger create node.db
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

from discreet.federated.durable_ledger import DurableLedger, LedgerError
from discreet.federated.guarantees import GUARANTEES
from discreet.federated.run_folder import CONFIG, RunFolder
from discreet.privacy.accountants import ACCOUNTANTS
from discreet.privacy.accounting import pure_epsilon
from discreet.privacy.events import event_to_json
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
        for guarantee in GUARANTEES:
            for holder in ledger.holders(guarantee):
                spent = ledger.spent(guarantee, holder=holder)
                print(f"{guarantee}-level{f', client {holder}' if holder else ''}: {_events(spent)}")
                print(f"  {_epsilons(spent, delta)}")


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


def adopt(run: Path) -> None:
    """Lets this machine go on with ledgers."""
    for ledger in ledgers_of(run):
        ledger.adopt()
        print(f"{ledger.path}: goes on here after {ledger.mark().rows} rows")


def _delta(run: Path, given: float | None) -> float:
    """The delta that was given, or the run's own; of a ledger without a run `DEFAULT_DELTA`."""
    if given is not None:
        return given
    return RunFolder(run).read_config().privacy.delta if (run / CONFIG).exists() else DEFAULT_DELTA


def main(words: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="discreet ledger", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("action", choices=("show", "verify", "export", "create", "adopt"))
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--delta", type=float, help="of the epsilons shown; the run's own by default, else 1e-5")
    chosen = parser.parse_args(words)
    try:
        if chosen.action == "verify":
            return verify(chosen.run)
        if chosen.action == "show":
            show(chosen.run, delta=_delta(chosen.run, chosen.delta))
        else:
            {"export": export, "create": create, "adopt": adopt}[chosen.action](chosen.run)
    except (LedgerError, ValueError) as error:
        print(f"discreet: {error}", file=sys.stderr)
        return 2
    return 0
