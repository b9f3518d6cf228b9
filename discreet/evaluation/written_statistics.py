"""Statistics of clients' data as a run folder has them: asked for, charged, and written to statistics.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from discreet.data.examples import Task
from discreet.evaluation.private_statistics import ask, data_query
from discreet.logs import json_ready
from discreet.mechanisms.sums import Replies
from discreet.queries.answers import Estimate
from discreet.queries.query import STATISTICS
from discreet.server.run_context import RunContext
from discreet.server.run_folder import replace_file
from discreet.settings.privacy import USER

FILE = "statistics.json"
Found = Mapping[str, Mapping[str, Estimate]]


def written_statistics(run: RunContext, task: Task, answers: Replies) -> str:
    """The statistics that clients' answers to STATISTICS give, as a text; `statistics.json` is written.

    Raises:
      ConfigError: asking would pass the budget; nobody is asked then.
    """
    query = data_query(STATISTICS, run.plan, task)
    sums = ask(run, query, answers, name=STATISTICS)
    found = query.read(sums)
    spent = _price(run)
    text = json.dumps(json_ready(_facts(found, spent)), indent=2) + "\n"
    replace_file(run.folder.path / FILE, text.encode())
    return _table(found) + "\n" + _said(spent, run.folder.path)


def _price(run: RunContext) -> dict[str, object]:
    """What the ledger holds with these statistics."""
    told, user = run.plan.run, run.plan.guarantees[0]
    return {
        "noise_multiplier": told.statistics.noise_multiplier,
        "unit": user.unit,
        "adjacency": user.adjacency,
        "delta": told.delta,
        "epsilon": run.ledger.spent(USER).epsilon(told.delta, told.accountant),
        "accountant": told.accountant,
        "protects_nobody": run.plan.seed is not None,
    }


def _facts(found: Found, spent: Mapping[str, object]) -> dict[str, object]:
    numbers = {
        what: {of: {"value": one.value, "standard_error": one.standard_error} for of, one in row.items()}
        for what, row in found.items()
    }
    return {"statistics": numbers, "privacy": spent}


def _table(found: Found) -> str:
    rows = [("statistic", "of", "value", "standard error")]
    for what, row in found.items():
        rows += [(what, of, f"{one.value:.5g}", f"{one.standard_error:.2g}") for of, one in row.items()]
    widths = [max(len(row[place]) for row in rows) for place in range(4)]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n" for row in rows
    )


def _said(spent: Mapping[str, object], folder: Path) -> str:
    nobody = "; seed is set, so that the noise protects nobody" if spent["protects_nobody"] else ""
    return (
        f"user-level: epsilon {spent['epsilon']:.4g} by {spent['accountant']} at delta {spent['delta']:g} spent by now "
        f"({spent['unit']}; {spent['adjacency']}){nobody}\nwritten to {folder / FILE}\n"
    )
