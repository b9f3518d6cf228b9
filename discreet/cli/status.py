"""Shows the state of a run from its run folder, during the run or afterwards.

examples:
  discreet status outputs/first
  discreet status outputs/first --json
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from discreet.logs import json_ready
from discreet.mechanisms.mechanism import REPORTED
from discreet.planning.plan import Plan
from discreet.reporting.epsilons import spent_epsilons
from discreet.run_files.metrics_table import SCORES, Rated, rated_in, score_columns
from discreet.run_files.opening import has_writer
from discreet.run_files.run_folder import RunFolder, RunStatus, read_status
from discreet.server.population_account import PopulationAccount
from discreet.settings.adjacency import GUARANTEES

Facts = dict[str, Any]
NOT_KNOWN = "not known: status.json is missing or damaged"
KILLED = "no process writes it: resume=true goes on after its last round"


def command(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="a run folder")],
    as_json: Annotated[
        bool, typer.Option("--json", help="print one JSON object instead of text")
    ] = False,
) -> None:
    """Prints the status of a run."""
    run = RunFolder(folder.expanduser().resolve())
    print(json.dumps(json_ready(status_facts(run))) if as_json else "\n".join(status_lines(run)))


def status_facts(folder: RunFolder) -> Facts:
    """The state of a run: round, epsilon spent and left, connected nodes, last failure.

    The epsilons are those of `spent_epsilons`. Raises ConfigError: the folder holds no run;
    LedgerError: a ledger or the checkpoint is damaged."""
    plan = Plan(folder.read_config())
    status = read_status(folder)
    done = folder.done()
    rows = folder.read_metrics()
    fault = folder.metrics_fault(rows, done)
    if rows and not fault:
        row = rows[-1]
    else:
        row = {}
    done = max(done, int(row.get("round") or 0))
    if status and status.state == "running" and not has_writer(folder.path):
        status = replace(status, state="interrupted", reason=KILLED)
    facts: Facts = {"run": str(folder.path), "state": _state(status, done)}
    facts |= {
        "round": done,
        "rounds": status.rounds if status else plan.run.rounds,
    }
    facts |= _failures(status)
    facts |= {name: row.get(name) for name in (*score_columns([row]), "loss", "cohort", "replies")}
    facts["epsilon"] = _epsilons(folder, plan, rows)
    rated = ((each["round"], rated_in(each)) for each in reversed(rows))
    ratings = (
        {"round": int(at or 0), "numbers": list(map(asdict, found))} for at, found in rated if found
    )
    if account := PopulationAccount.of(plan):
        whose = {
            "population": account.population.name,
            "file": str(account.path),
            "runs": account.runs,
        }
        facts["account"] = whose | _spending(
            account.budget.epsilon(account.ledger.whole().total()), account.budget.max_epsilon
        )
    facts["fault"] = fault or None
    return {"account": None} | facts | {"rating": next(ratings, None)}


def _state(status: RunStatus | None, done: int) -> str:
    if status is not None:
        return status.state
    if done:
        return NOT_KNOWN
    return "not started"


def _failures(status: RunStatus | None) -> Facts:
    """What the status says beside state and rounds."""
    if status is None:
        return {}
    since = datetime.now(UTC) - datetime.fromisoformat(status.updated)
    facts: Facts = {
        "seconds_since_update": round(since.total_seconds()),
        "failures": dict(status.failures),
    }
    for name in ("reason", "nodes", "last_failure", "last_failure_round"):
        facts[name] = getattr(status, name)
    return facts


def _epsilons(
    folder: RunFolder, plan: Plan, rows: Sequence[Mapping[str, float | None]]
) -> dict[str, Facts | None]:
    """The spending of each guarantee; None if it is off."""
    found = dict[str, Facts | None].fromkeys(GUARANTEES)
    spent = spent_epsilons(folder, plan, rows)
    for name, mechanism in plan.mechanisms.items():
        budget = plan.run.largest_epsilon(name)
        if plan.account is not None and not REPORTED[name]:
            budget = None  # the budget is that of all runs over the population
        found[name] = _spending(spent[name], budget) | {"unit": mechanism.statement().unit}
    return found


def _spending(spent: float, budget: float | None) -> Facts:
    return {
        "spent": spent,
        "budget": budget,
        "left": None if budget is None else max(0.0, budget - spent),
    }


def status_lines(folder: RunFolder) -> Iterator[str]:
    """`status_facts` as text, a line for each fact."""
    facts = status_facts(folder)
    yield f"run        {facts['run']}"
    yield f"state      {facts['state']}" + (f": {facts['reason']}" if facts.get("reason") else "")
    if "seconds_since_update" in facts:
        since = f", {facts['seconds_since_update']} s ago"
    else:
        since = ""
    yield f"round      {facts['round']} of {facts['rounds']}{since}"
    if facts["fault"]:
        yield f"fault      {facts['fault']}"
    known = [
        f"{name} {facts[name]:.4f}" for name in (*SCORES, "loss") if facts.get(name) is not None
    ]
    if rating := facts["rating"]:
        numbers = ", ".join(str(Rated(**each)) for each in rating["numbers"])
        yield f"rated      after round {rating['round']} by clients: {numbers}"
    elif known:
        yield f"scores     after round {facts['round']}: {', '.join(known)}"
    account = facts["account"]
    if facts["account"]:
        unlimited = "; its budget is that of all runs"
    else:
        unlimited = ", no budget"
    for name, spending in facts["epsilon"].items():
        yield f"epsilon    {name} {_spent(spending, unlimited) if spending else 'none (off)'}"
    if account:
        yield (
            f"account    all runs on {account['population']} ({account['runs']}) "
            f"{_spent(account, ', no budget')}"
        )
    if facts.get("nodes") is not None:
        replied = ""
        if facts["cohort"] is not None:
            replied = f", {facts['cohort']:.0f} asked, {facts['replies'] or 0:.0f} replied"
        yield f"nodes      {facts['nodes']} connected{replied}"
    if failures := facts.get("failures"):
        counted = ", ".join(f"{kind} {count}" for kind, count in failures.items())
        yield (
            f"failures   {counted}; in round {facts['last_failure_round']}: {facts['last_failure']}"
        )


def _spent(spending: Facts, unlimited: str) -> str:
    if spending["budget"] is None:
        left = unlimited
    else:
        left = ", {left:.4g} of {budget:g} left".format(**spending)
    if "unit" in spending:
        left += f" ({spending['unit']})"
    return f"{spending['spent']:.4g} spent{left}"
