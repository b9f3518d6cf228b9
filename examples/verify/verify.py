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

logging.getLogger("absl").setLevel(logging.ERROR)  # of orders that are skipped
PLD, RDP = dp.pld.PLDAccountant, dp.rdp.RdpAccountant
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
kept elsewhere; other runs on the same people; what words promise (unit, observer)."""


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
    counted = (RDP if accountant == "rdp" else PLD)(neighboring_relation=relation)
    for text, count in spent:
        counted.compose(event_of(json.loads(text)), count)
    return counted.get_epsilon(1e-12 if accountant == "pure" else delta)


def read_ledger(path):
    """The settings, the head, the rows and the finding about a ledger."""
    with sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True) as connection:
        facts = dict(connection.execute("select name, value from facts"))
        rows = connection.execute("select * from releases order by number").fetchall()
    head, count = facts.pop("head"), int(facts.pop("rows"))
    digest, wrong = "", ""
    for place, (*content, said) in enumerate([[*sorted(facts.items()), None], *rows]):
        digest = hashlib.sha256(json.dumps([digest, *content]).encode()).hexdigest()
        if place and (content[0], said) != (place, digest) and not wrong:
            wrong = f"do not fit the chain at row {place}"
    if not wrong and (len(rows), digest) != (count, head):
        wrong = "lack the last ones"
    words = f"{path.name}: {len(rows)} rows {wrong or 'are a chain'}, whose head is {head}"
    return {name: json.loads(value) for name, value in facts.items()}, head, rows, words, not wrong


def spent_in(rows, last=math.inf):
    """For each (guarantee, data owner) its events up to a round, with their counts."""
    found = {}
    for _, made_in, guarantee, holder, event, count, *_ in rows:
        if made_in <= last:
            found.setdefault((guarantee, holder), Counter())[event] += count
    return {who: frozenset(events.items()) for who, events in found.items()}


def check_guarantee(each, privacy, metrics, card, rows):
    """The findings about every epsilon that is said of a guarantee."""
    name, rounds, delta, by = each["name"], *map(privacy.get, ("rounds", "delta", "accountant"))
    said_by = {by: "nan", **each["epsilon"]}
    claims = [("privacy.json", rounds, delta, *said) for said in said_by.items()]
    for row in metrics:
        where, said = f"metrics.csv, round {row['round']}", row.get(f"epsilon_{name}", "nan")
        claims.append((where, int(row["round"]), delta, by, said))
    cells = rf"^\|[ *`]*{name}[ *`]*\|[ *`]*(none|[\d.e+-]+)[^|]*\|[ *`]*([\d.e+-]*)"
    for said, of in re.findall(cells, card, re.M) or [("nan", "")] * bool(card):
        claims.append(("model card", rounds, float(of or delta), by, said.replace("none", "inf")))
    for where, last, delta, accountant, said in claims:
        words = f"{where}: {name} is {said} by {accountant} at delta {delta:g}"
        spent = {events for (who, _), events in spent_in(rows, last).items() if who == name}
        found = max((epsilon_of(one, delta, accountant) for one in spent), default=math.inf)
        if each["enabled"] and isinstance(each["events"], str) and not spent:
            yield f"{words} by the nodes' own ledgers: verify those", True
        else:
            yield f"{words}, recomputed {found:.6g}", float(said) >= 0.998 * found  # both round


def check_run(folder, card):
    """The findings about a run folder, each with whether it is so."""
    privacy = json.loads((folder / "privacy.json").read_text())
    metrics = [*csv.DictReader((folder / "metrics.csv").read_text().splitlines())]
    rows = []
    for path in [*folder.glob("clients.db"), folder / "ledger.db"]:
        facts, head, more, *finding = read_ledger(path)
        yield finding
        rows += more
    yield "privacy.json: ledger_head is that of ledger.db", privacy["ledger_head"] == head
    yield "privacy.json: delta is that of ledger.db", privacy["delta"] == facts["privacy.delta"]
    last = max(int(each) for each in [metrics[-1]["round"], *(row[1] for row in rows)])
    yield f"privacy.json: {privacy['rounds']} rounds of {last}", privacy["rounds"] == last
    on = {each["name"]: each["events"] for each in privacy["guarantees"] if each["enabled"]}
    off = {row[2] for row in rows} - on.keys()
    yield f"privacy.json: nothing was charged that is off {sorted(off)}", not off
    for name in (name for name, events in on.items() if isinstance(events, list)):
        missing = {*range(1, last + 1)} - {row[1] for row in rows if row[2] == name}
        yield f"all {last} rounds were charged for {name}", not missing
    for each in privacy["guarantees"]:
        yield from check_guarantee(each, privacy, metrics, card, rows)


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
