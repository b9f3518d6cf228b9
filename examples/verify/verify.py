"""Checks epsilons without Discreet, by Google's dp_accounting: verify.py RUN_FOLDER [MODEL_CARD],
or verify.py LEDGER.db [DELTA]. Ends with 1 if WRONG or not readable, 3 if NOT VERIFIED."""

import csv
import hashlib
import json
import logging
import math
import re
import sqlite3
import sys
from collections import Counter, namedtuple
from pathlib import Path

import dp_accounting as dp

logging.getLogger("absl").setLevel(logging.ERROR)  # of orders that are skipped
ROWS = """select *, case when event like '%repeat_and_select%' then 1 when round > 0 then round
else 1 + max(round) over (order by number) end from releases order by number"""
Row = namedtuple("Row", "number round guarantee owner event count nonce digest since")
OFF = Row(0, 0, "", "", '{"kind": "non_private"}', 1, "", "", 0)
CANT_KNOW = """What can't be seen here: how noise and cohorts were drawn; the clip norm; what else
left; other runs on these people; what else files say; another ledger, unless you kept its head."""


def event_of(said):
    """An event, of made parts. Discrete Gaussians: Kairouz, Liu and Steinke 2021, Prop. 14."""
    if (kind := said.pop("kind")) != "distributed_discrete_gaussian":
        return getattr(dp.dp_event, kind.title().replace("_", "") + "DpEvent")(**said)
    variance, clients, moved = said["variance"], said["summands"], said["sensitivity_squared"]
    parts = [math.exp(-2 * math.pi**2 * variance * k / (k + 1)) for k in range(1, clients)]
    gap = 10 * sum(parts) * math.sqrt(min(said["dimension"], moved))
    return dp.GaussianDpEvent(1 / (math.sqrt(moved / (clients * variance)) + gap))


def epsilon_of(rows, delta, accountant):  # the largest that rows cost a data owner
    fixed_size = any("without_replacement" in row.event for row in rows)
    relation = dp.NeighboringRelation["REPLACE_ONE" if fixed_size else "ADD_OR_REMOVE_ONE"]
    made = dp.rdp.RdpAccountant if accountant == "rdp" else dp.pld.PLDAccountant
    spent, found = {row.owner: Counter() for row in rows}, [0.0]
    for row in rows:
        spent[row.owner][row.event.replace('"inf"', "Infinity")] += row.count
    for events in {frozenset(counts.items()) for counts in spent.values()}:
        counted = made(neighboring_relation=relation)
        for text, count in events:
            counted.compose(json.loads(text, object_hook=event_of), count)
        found.append(counted.get_epsilon(1e-12 if accountant == "pure" else delta))
    return math.inf if accountant == "pure" and "gaussian" in str(rows) else max(found)


def read_ledger(path):
    """The settings, heads, rows and finding. Statistics (round 0) count since the next round."""
    with sqlite3.connect(f"{path.resolve(strict=True).as_uri()}?mode=ro", uri=True) as connection:
        facts = dict(connection.execute("select name, value from facts"))
        rows = [Row(*row) for row in connection.execute(ROWS)]
    head, count = facts.pop("head"), int(facts.pop("rows"))
    heads, wrong = [""], ""
    for place, (*content, said, _) in enumerate([[*sorted(facts.items()), None, None], *rows]):
        heads.append(hashlib.sha256(json.dumps([heads[-1], *content]).encode()).hexdigest())
        if place and (content[0], said) != (place, heads[-1]) and not wrong:
            wrong = f"do not fit the chain at row {place}"
    if not wrong and (len(rows), heads[-1]) != (count, head):
        wrong = "lack the last ones"
    words = f"{path.name}: {len(rows)} rows {wrong or 'are a chain'}, whose head is {head}"
    return facts, heads[1:], rows, (words, not wrong)


def claims_of(privacy, metrics, card, rows):  # of what, the epsilon, rows, delta and accountant
    delta, by = privacy["delta"], privacy["accountant"]
    for each in privacy["guarantees"]:
        name = each["name"]
        charged = [row for row in rows if row.guarantee == name] if each["enabled"] else [OFF]
        for accountant, said in {by: "missing", **each["epsilon"]}.items():
            yield f"privacy.json: {name}", said, charged, delta, accountant
        for at in metrics:
            where, said = f"metrics.csv, round {at['round']}", at.get(f"epsilon_{name}", "missing")
            by_then = [row for row in charged if row.since <= int(at["round"])]
            yield f"{where}: {name}", said, by_then, delta, by
        cells = rf"^\|[ *`]*{name}[ *`]*\|[ *`]*(none|[\d.e+-]+)[^|]*\|[ *`]*([\d.e+-]*)"
        for said, of in re.findall(cells, card, re.M) or [("missing", "")] * bool(card):
            yield f"model card: {name}", said, charged, float(of or delta), by
    charged = [row for row in rows if row.guarantee == "user"]
    for accountant, said in (privacy.get("account") or {"epsilon": {}})["epsilon"].items():
        yield "privacy.json: this run and others (account)", said, charged, delta, accountant
    for row in charged if "selection" in privacy else []:
        one = row._replace(event=json.dumps(json.loads(row.event)["event"]))
        yield "selection: epsilon", privacy["selection"]["epsilon"], [row], delta, "rdp"
        yield "one trial", privacy["selection"]["epsilon_of_one_trial"], [one], delta, "rdp"


def check_run(folder, card, facts, heads, rows):
    """The findings about a run folder: whether each is so, None if that is seen elsewhere."""
    privacy = json.loads((folder / "privacy.json").read_text())
    metrics = [*csv.DictReader((folder / "metrics.csv").read_text().splitlines())]
    head, delta, clients = privacy["ledger_head"], privacy["delta"], folder / "clients.db"
    yield "privacy.json: ledger_head is one of ledger.db", head in heads
    yield "privacy.json: delta is that of ledger.db", delta == float(facts["privacy.delta"])
    place = heads.index(head) if head in heads else len(rows)
    rows, later = rows[:place], [row.round for row in rows[place:]]
    yield f"after privacy.json: {len(later)} rows, of statistics alone", {*later} <= {0}
    if privacy.get("clients_head") or clients.exists():
        _, ends, more, (words, fine) = read_ledger(clients)
        yield f"{words} (clients_head)", fine and privacy.get("clients_head") == ends[-1]
        rows = rows + more
    last = max([0, *(int(line["round"]) for line in metrics), *(row.round for row in rows)])
    yield f"privacy.json: {privacy['rounds']} rounds of {last}", privacy["rounds"] == last
    on = {each["name"]: each for each in privacy["guarantees"] if each["enabled"]}
    off = {row.guarantee for row in rows} - on.keys()
    yield f"privacy.json: nothing was charged that is off {' '.join(sorted(off))}", not off
    for name, each in on.items():
        paid = [range(row.since, row.round + 1) for row in rows if row.guarantee == name]
        if isinstance(each["events"], list):
            yield f"all {last} rounds were charged for {name}", len(set().union(*paid)) == last
        elif not clients.exists():
            privacy["guarantees"].remove(each)
            yield f"{name} is {each['epsilon']} by the nodes' own ledgers: verify those", None
    if privacy.get("account"):
        yield "account: verify the file in config.yaml, at privacy.user.account", None
    for what, said, charged, delta, by in claims_of(privacy, metrics, card, rows):
        found, told = epsilon_of(charged, delta, by), {"none": "inf", "missing": "nan"}
        fine = float(told.get(said, said)) >= 0.998 * found  # both are rounded
        if charged != [OFF] or not fine:
            yield f"{what} is {said} by {by} at delta {delta:g}, recomputed {found:.6g}", fine


def main(path=".", word=""):
    folder = Path(path)
    facts, heads, rows, finding = read_ledger(folder / "ledger.db" if folder.is_dir() else folder)
    run = folder.is_dir() and (any(row.round for row in rows) or (folder / "privacy.json").exists())
    found = [(CANT_KNOW, True), finding]
    if run:
        found += check_run(folder, word and Path(word).read_text() + " ", facts, heads, rows)
    rows = [row._replace(owner="") if "size" in facts else row for row in rows]  # owners are runs
    delta = float((not run and word) or facts.get("privacy.delta") or facts.get("delta", "DELTA?"))
    for name in sorted({row.guarantee for row in rows}):
        epsilon = epsilon_of([row for row in rows if row.guarantee == name], delta, "rdp")
        found.append((f"{name}, all rows: at most {epsilon:.6g} by rdp at delta {delta:g}", True))
    for said, fine in sorted(found, key=lambda each: each[1] is None):
        print({True: "", False: "WRONG: ", None: "NOT VERIFIED: "}[fine] + said)
    wrong, unknown = ([fine for _, fine in found].count(each) for each in (False, None))
    verdict = f"NOT VERIFIED: {unknown} of the lines above" if unknown else "ALL RIGHT"
    print(f"WRONG: {wrong} of the lines above" if wrong else verdict)
    return 1 if wrong else 3 if unknown else 0


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:3]))
    except (OSError, ValueError, sqlite3.DatabaseError) as error:
        sys.exit(f"{' '.join(sys.argv[1:])} can't be verified: {error}\n\n{__doc__}")
