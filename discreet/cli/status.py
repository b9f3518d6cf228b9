"""Says how a run stands, from its run folder: while it goes on, or afterwards.

examples:
  discreet status outputs/first
  discreet status outputs/first --json
"""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from discreet.federated.durable_ledger import DurableLedger
from discreet.federated.guarantees import EXAMPLE, LOCAL, USER
from discreet.federated.population_account import PopulationAccount
from discreet.federated.run_folder import RunFolder, read_status
from discreet.json_numbers import json_ready
from discreet.settings.run_config import RunConfig
from discreet.tasks.scores import SCORES, Rated, rated_in, score_columns

Facts = dict[str, Any]


def command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="a run folder")],
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of text")] = False,
) -> None:
    """Prints the status of a run."""
    run = RunFolder(folder.expanduser().resolve())
    print(json.dumps(json_ready(status_facts(run))) if as_json else "\n".join(status_lines(run)))


def status_facts(folder: RunFolder) -> Facts:
    """The state of a run: round, epsilon spent and left, connected nodes, last failure.

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
        facts["seconds_since_update"] = round(
            (datetime.now(UTC) - datetime.fromisoformat(status.updated)).total_seconds()
        )
        facts |= {"reason": status.reason, "nodes": status.nodes, "failures": dict(status.failures)}
        facts |= {"last_failure": status.last_failure, "last_failure_round": status.last_failure_round}
    facts |= {name: row.get(name) for name in (*score_columns([row]), "loss", "cohort", "replies")}
    facts["epsilon"] = {
        name: _epsilon(name, folder, config, row.get(f"epsilon_{name}")) for name in (USER, EXAMPLE, LOCAL)
    }
    rated = ((each["round"], rated_in(each)) for each in reversed(rows))
    ratings = ({"round": int(at or 0), "numbers": list(map(asdict, found))} for at, found in rated if found)
    return facts | {"account": _account(config), "rating": next(ratings, None)}


def _account(config: RunConfig) -> Facts | None:
    """The spending of all runs on the population; None if the run charges no account."""
    account = PopulationAccount.of(config)
    if account is None:
        return None
    spent = account.budget.epsilon(account.total())
    whose = {"population": account.population.name, "file": str(account.path), "runs": len(account.runs())}
    return whose | _spending(spent, account.budget.max_epsilon)


def _epsilon(name: str, folder: RunFolder, config: RunConfig, reported: float | None) -> Facts | None:
    """The spending of a guarantee; None if it is off."""
    privacy = config.privacy
    on, budget = {
        USER: (privacy.user.enabled, None if privacy.user.account else privacy.user.max_epsilon),
        EXAMPLE: (privacy.example.enabled, privacy.example.max_epsilon or privacy.example.target_epsilon),
        LOCAL: (privacy.local.kind != "none", privacy.local.max_epsilon or privacy.local.epsilon),
    }[name]
    if on and name == USER and folder.ledger_path.exists():
        reported = DurableLedger(folder.ledger_path).spent(USER).epsilon(privacy.delta, privacy.accountant)
    return _spending(reported or 0.0, budget) if on else None


def _spending(spent: float, budget: float | None) -> Facts:
    return {"spent": spent, "budget": budget, "left": None if budget is None else max(0.0, budget - spent)}


def status_lines(folder: RunFolder) -> list[str]:
    """`status_facts` as text, a line for each fact."""
    facts = status_facts(folder)
    since = f", {facts['seconds_since_update']} s ago" if "seconds_since_update" in facts else ""
    why = f": {facts['reason']}" if facts.get("reason") else ""
    lines = [f"run        {facts['run']}", f"state      {facts['state']}{why}"]
    lines.append(f"round      {facts['round']} of {facts['rounds']}{since}")
    known = [(name, f"{facts[name]:.4f}") for name in (*SCORES, "loss") if facts.get(name) is not None]
    if rating := facts["rating"]:
        numbers = ", ".join(str(Rated(**each)) for each in rating["numbers"])
        lines.append(f"rated      after round {rating['round']} by clients: {numbers}")
    elif known:
        lines.append(f"{known[0][0]:10} " + ", ".join([known[0][1], *map(" ".join, known[1:])]))
    account = facts["account"]
    unlimited = "; its budget is that of all runs" if account else ", no budget"
    for name, spending in facts["epsilon"].items():
        lines.append(f"epsilon    {name} {_spent(spending, unlimited)}")
    if account:
        lines.append(
            f"account    all runs on {account['population']} ({account['runs']}) {_spent(account, ', no budget')}"
        )
    if facts.get("nodes") is not None:
        asked, replied = facts["cohort"] or 0, facts["replies"] or 0
        lines.append(f"nodes      {facts['nodes']} connected, {asked:.0f} asked, {replied:.0f} replied")
    if failures := facts.get("failures"):
        counted = ", ".join(f"{kind} {count}" for kind, count in failures.items())
        lines.append(f"failures   {counted}; in round {facts['last_failure_round']}: {facts['last_failure']}")
    return lines


def _spent(spending: Facts | None, unlimited: str) -> str:
    if spending is None:
        return "none (off)"
    left = unlimited if spending["budget"] is None else ", {left:.4g} of {budget:g} left".format(**spending)
    return f"{spending['spent']:.4g} spent{left}"
