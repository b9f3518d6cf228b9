"""Says how a run stands, from its run folder: while it goes on, or afterwards."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from discreet.config import ConfigError, RunConfig
from discreet.federated.durable_ledger import DurableLedger, LedgerError
from discreet.federated.guarantees import EXAMPLE, LOCAL, USER
from discreet.federated.population_account import PopulationAccount
from discreet.federated.run_folder import RunFolder, read_status
from discreet.json_numbers import json_ready
from discreet.tasks.scores import SCORES, Rated, rated_in, score_columns

EXAMPLES = """examples:
  discreet status outputs/first
  discreet status outputs/first --json
"""
Facts = dict[str, object]


def status_facts(folder: RunFolder, *, now: datetime | None = None) -> Facts:
    """What is known of a run: round, epsilon spent and left, connected nodes, last failure.

    The user-level epsilon comes from the ledger, which a crash may leave ahead of the metrics, never behind them. The
    other epsilons are the largest that a client reported.

    Raises:
      ConfigError: the folder holds no run.
      LedgerError: its ledger is damaged.
    """
    config, status, rows = folder.read_config(), read_status(folder), folder.read_metrics()
    row = rows[-1] if rows else {}
    facts: Facts = {"run": str(folder.path), "state": status.state if status else "not started"}
    facts |= {"round": int(row.get("round") or 0), "rounds": status.rounds if status else config.rounds}
    if status:
        updated = datetime.fromisoformat(status.updated)
        facts["seconds_since_update"] = round(((now or datetime.now(UTC)) - updated).total_seconds())
        facts |= {"reason": status.reason, "nodes": status.nodes, "failures": dict(status.failures)}
        facts |= {"last_failure": status.last_failure, "last_failure_round": status.last_failure_round}
    facts |= {name: row.get(name) for name in (*score_columns([row]), "loss", "cohort", "replies")}
    facts["epsilon"] = {
        name: _epsilon(name, folder, config, row.get(f"epsilon_{name}")) for name in (USER, EXAMPLE, LOCAL)
    }
    facts["account"] = _account(config)
    facts["rating"] = _rating(rows)
    return facts


def _rating(rows: Sequence[Mapping[str, float | None]]) -> Facts | None:
    """The last rating by clients, with both standard errors of each number; None if there is none yet."""
    for row in reversed(rows):
        if found := rated_in(row):
            return {"round": int(row["round"] or 0), "numbers": [asdict(each) for each in found]}
    return None


def _account(config: RunConfig) -> Facts | None:
    """What the run's population has spent in all runs; None if it charges no account."""
    account = PopulationAccount.of(config)
    if account is None:
        return None
    spent, budget = account.budget.epsilon(account.total()), account.budget.max_epsilon
    left = None if budget is None else max(0.0, budget - spent)
    whose = {"population": account.population.name, "file": str(account.path), "runs": len(account.runs())}
    return {**whose, "spent": spent, "budget": budget, "left": left}


def _epsilon(name: str, folder: RunFolder, config: RunConfig, reported: float | None) -> dict[str, float | None] | None:
    """What a guarantee has spent, its budget, and what is left of it; None if it is off."""
    privacy = config.privacy
    on, budget = {
        USER: (privacy.user.enabled, privacy.user.max_epsilon),
        EXAMPLE: (privacy.example.enabled, privacy.example.max_epsilon or privacy.example.target_epsilon),
        LOCAL: (privacy.local.kind != "none", privacy.local.max_epsilon or privacy.local.epsilon),
    }[name]
    if not on:
        return None
    spent = reported or 0.0
    if name == USER and folder.ledger_path.exists():
        spent = DurableLedger(folder.ledger_path).spent(USER).epsilon(privacy.delta, privacy.accountant)
    if name == USER and privacy.user.account is not None:
        budget = None  # it holds over all runs, which `account` tells
    left = None if budget is None else max(0.0, budget - spent)
    return {"spent": spent, "budget": budget, "left": left}


def status_lines(folder: RunFolder) -> list[str]:
    """`status_facts` as text, a line for each fact."""
    facts = status_facts(folder)
    since = f", {facts['seconds_since_update']} s ago" if "seconds_since_update" in facts else ""
    why = f": {facts['reason']}" if facts.get("reason") else ""
    lines = [f"run        {facts['run']}", f"state      {facts['state']}{why}"]
    lines.append(f"round      {facts['round']} of {facts['rounds']}{since}")
    known = [f"{name} {facts[name]:.4f}" for name in (*SCORES, "loss") if facts.get(name) is not None]
    if isinstance(rating := facts["rating"], dict):
        numbers = ", ".join(str(Rated(**each)) for each in rating["numbers"])
        lines.append(f"rated      after round {rating['round']} by clients: {numbers}")
    elif known:
        lines.append("{:10} {}".format(*", ".join(known).split(" ", 1)))
    epsilons = facts["epsilon"]
    assert isinstance(epsilons, dict)
    lines += [_epsilon_line(name, values) for name, values in epsilons.items()]
    if isinstance(account := facts["account"], dict):
        lines = [line.replace("spent, no budget", "spent; its budget is that of all runs") for line in lines]
        said = _epsilon_line(f"all runs on {account['population']} ({account['runs']})", account)
        lines.append(said.replace("epsilon ", "account ", 1))
    if facts.get("nodes") is not None:
        asked, replied = _whole(facts["cohort"]), _whole(facts["replies"])
        lines.append(f"nodes      {facts['nodes']} connected, {asked} asked, {replied} replied")
    failures = facts.get("failures")
    if isinstance(failures, dict) and failures:
        counted = ", ".join(f"{kind} {count}" for kind, count in failures.items())
        lines.append(f"failures   {counted}; in round {facts['last_failure_round']}: {facts['last_failure']}")
    return lines


def _whole(value: object) -> str:
    return f"{value:.0f}" if isinstance(value, float) else "0"


def _epsilon_line(name: str, values: dict[str, float | None] | None) -> str:
    if values is None:
        return f"epsilon    {name} none (off)"
    spent, budget, left = (values[key] for key in ("spent", "budget", "left"))
    assert spent is not None
    tail = "no budget" if budget is None or left is None else f"{left:.4g} of {budget:g} left"
    return f"epsilon    {name} {spent:.4g} spent, {tail}"


def main(words: Sequence[str]) -> int:
    """Prints the status; 2 if there is no run."""
    parser = argparse.ArgumentParser(
        prog="discreet status",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="RUN", help="a run folder, of a run that goes on or has ended")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    arguments = parser.parse_args(words)
    folder = RunFolder(arguments.folder.expanduser().resolve())
    try:
        print(json.dumps(json_ready(status_facts(folder))) if arguments.json else "\n".join(status_lines(folder)))
    except (ConfigError, LedgerError) as error:
        print(f"discreet: {error}", file=sys.stderr)
        return 2
    return 0
