"""Checks the epsilons of a run folder, or of a ledger, without Discreet: by Google's dp_accounting.

    python verify.py RUN_FOLDER [MODEL_CARD]
    python verify.py LEDGER.db DELTA             # of a node, a site or a population

It ends with 1 if something that is published is not what the ledger says."""

import csv
import hashlib
import json
import logging
import math
import re
import sqlite3
import sys
from collections import Counter
from pathlib import Path

import dp_accounting as dp
from dp_accounting import SampledWithoutReplacementDpEvent as FixedSize
from dp_accounting import pld, rdp

TOLERANCE = 2e-3  # relative: two accountants round differently
logging.getLogger("absl").setLevel(logging.ERROR)  # of orders that are skipped
KINDS = {
    "gaussian": (dp.GaussianDpEvent, "noise_multiplier"),
    "laplace": (dp.LaplaceDpEvent, "noise_multiplier"),
    "poisson_sampled": (dp.PoissonSampledDpEvent, "sampling_probability", "event"),
    "sampled_without_replacement": (FixedSize, "source_dataset_size", "sample_size", "event"),
    "self_composed": (dp.SelfComposedDpEvent, "event", "count"),
    "composed": (dp.ComposedDpEvent, "events"),
    "repeat_and_select": (dp.dp_event.RepeatAndSelectDpEvent, "event", "mean", "shape"),
    "non_private": (dp.NonPrivateDpEvent,),
    "no_op": (dp.NoOpDpEvent,),
}
CANT_KNOW = """What can't be seen here: that noise and cohorts were drawn, for the right clip norm;
that nothing else left; that this is the ledger that was charged, unless its head equals a copy
that was kept elsewhere; other runs on the same people."""


def event_of(said):
    """An event, or a field of one. Discrete Gaussians: Kairouz, Liu and Steinke 2021, Prop. 14."""
    if isinstance(said, list):
        return [event_of(part) for part in said]
    if not isinstance(said, dict):
        return math.inf if said == "inf" else said
    if said["kind"] != "distributed_discrete_gaussian":
        made, *names = KINDS[said["kind"]]
        return made(*(event_of(said[name]) for name in names))
    variance, clients, moved = said["variance"], said["summands"], said["sensitivity_squared"]
    parts = [math.exp(-2 * math.pi**2 * variance * k / (k + 1)) for k in range(1, clients)]
    gap = 10 * sum(parts) * math.sqrt(min(said["dimension"], moved))
    return dp.GaussianDpEvent(1 / (math.sqrt(moved / (clients * variance)) + gap))


def epsilon_of(spent, delta, accountant):
    """Epsilon of a frozenset of (event as JSON, count)."""
    fixed_size = any("without_replacement" in text for text, _ in spent)
    relation = dp.NeighboringRelation["REPLACE_ONE" if fixed_size else "ADD_OR_REMOVE_ONE"]
    kind = {"pld": pld.PLDAccountant, "rdp": rdp.RdpAccountant}[accountant]
    counted = kind(neighboring_relation=relation)
    for text, count in spent:
        counted.compose(event_of(json.loads(text)), count)
    return counted.get_epsilon(delta)


def read_ledger(path):
    """The settings, the head, the rows and the finding about a ledger."""
    with sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True) as connection:
        facts = dict(connection.execute("select name, value from facts"))
        rows = connection.execute("select * from releases order by number").fetchall()
    head, count = facts.pop("head"), int(facts.pop("rows"))
    digest, wrong = "", ""
    for place, row in enumerate([[*sorted(facts.items()), None], *rows]):
        *content, said = row
        digest = hashlib.sha256(json.dumps([digest, *content]).encode()).hexdigest()
        if place and (content[0], said) != (place, digest) and not wrong:
            wrong = f"do not fit the chain at row {place}"
    if not wrong and (len(rows), digest) != (count, head):
        wrong = "lack the last ones"
    words = f"{path.name}: {len(rows)} rows {wrong or 'are a chain'}, whose head is {head}"
    return {name: json.loads(value) for name, value in facts.items()}, head, rows, words, not wrong


def spent_in(rows):
    """For each (guarantee, data owner) its events with their counts."""
    found = {}
    for _, _, guarantee, holder, event, count, *_ in rows:
        found.setdefault((guarantee, holder), Counter())[event] += count
    return {who: frozenset(events.items()) for who, events in found.items()}


def claims_of(folder, privacy, card):
    """(where, guarantee, accountant, epsilon) of everything that the folder publishes."""
    on = {each["name"]: each["epsilon"] for each in privacy["guarantees"] if each["enabled"]}
    for name, epsilons in on.items():
        for accountant in epsilons.keys() & {"pld", "rdp"}:
            yield "privacy.json", name, accountant, float(epsilons[accountant])
    rows = list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))
    for name in on:
        yield "metrics.csv", name, privacy["accountant"], float(rows[-1][f"epsilon_{name}"])
    for name, epsilon in re.findall(r"^\| (user|example|local) \| ([\d.e+-]+) \|", card, re.M):
        yield "the model card", name, privacy["accountant"], float(epsilon)


def check_run(folder, card):
    """The findings about a run folder, each with whether it is as it should be."""
    privacy = json.loads((folder / "privacy.json").read_text())
    rows = []
    for path in [*folder.glob("clients.db"), folder / "ledger.db"]:
        facts, head, more, *finding = read_ledger(path)
        yield finding
        rows += more
    yield "privacy.json: ledger_head is that of ledger.db", privacy["ledger_head"] == head
    yield "privacy.json: delta is that of ledger.db", facts["privacy.delta"] == privacy["delta"]
    spent = spent_in(rows)
    charged = {name for name, _ in spent}
    off = charged & {each["name"] for each in privacy["guarantees"] if not each["enabled"]}
    yield f"privacy.json: nothing was charged that is off {sorted(off)}", not off
    for each in privacy["guarantees"]:
        if each["enabled"] and isinstance(each["events"], list):  # the server's ledger has them
            rounds = {row[1] for row in rows if row[2] == each["name"]}
            all_paid = rounds >= {*range(1, privacy["rounds"] + 1)}
            yield f"all {privacy['rounds']} rounds were charged for {each['name']}", all_paid
    for where, name, accountant, said in claims_of(folder, privacy, card):
        if name not in charged:
            yield f"{where}: {name} is {said:.6g} by the nodes' own ledgers: verify those", True
            continue
        different = {events for (charged_for, _), events in spent.items() if charged_for == name}
        found = max(epsilon_of(each, privacy["delta"], accountant) for each in different)
        words = f"{where}: {name} is {said:.6g} by {accountant}, recomputed {found:.6g}"
        yield words, said >= found * (1 - TOLERANCE)


def main(path, *words):
    """The exit code."""
    if Path(path).is_dir():
        found = [*check_run(Path(path), Path(words[0]).read_text() if words else "")]
    else:
        _, _, rows, *finding = read_ledger(Path(path))
        found = [finding]
        for (name, owner), spent in spent_in(rows).items():
            epsilon = epsilon_of(spent, float(words[0]), "rdp")
            found.append((f"{name} {owner}: at most {epsilon:.6g} by rdp at {words[0]}", True))
    print(*(said if fine else f"WRONG: {said}" for said, fine in found), CANT_KNOW, sep="\n")
    return 0 if all(fine for _, fine in found) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
