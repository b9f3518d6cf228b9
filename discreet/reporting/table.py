"""Runs, repetitions and ratings as rows of text: for the terminal, for a CSV file, for the page.

Every row of a table has the same columns.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from discreet.queries.scores import ERROR, score_columns
from discreet.reporting.records import RunRecord, group_runs, score_word, tried_settings, tried_values
from discreet.settings.privacy import GUARANTEES

Row = dict[str, str]


def split_same(rows: Sequence[Row]) -> tuple[Row, list[Row]]:
    """The cells that are the same in every row, and the rows without them. Of a single row all cells are."""
    same = {name: cell for name, cell in rows[0].items() if all(row[name] == cell for row in rows)}
    return same, [{name: cell for name, cell in row.items() if name not in same} for row in rows]


def runs_table(records: Sequence[RunRecord]) -> list[Row]:
    """A row for each run: scores and loss of its model, what it spent, what was tried, and the rest.

    A score that clients gave in one of the runs is followed by its standard error.
    """
    tried, scores = tried_settings(records), list[str]()
    for score in score_columns(record.rounds[-1] for record in records):
        rated = any(row.get(f"{score}{ERROR}") is not None for record in records for row in record.rounds)
        scores += [score, f"{score}{ERROR}"] if rated else [score]
    return [_row(record, scores, tried) for record in records]


def _row(record: RunRecord, scores: Sequence[str], tried: Sequence[str]) -> Row:
    privacy, rounds, seed = record.config.privacy, record.rounds, record.config.seed
    return {
        "run": record.name,
        **{name: _number(record.of_model(name), ".4f") for name in scores},
        **{f"epsilon {name}": f"{record.epsilon(name):.4g}" for name in GUARANTEES},
        **tried_values(record, tried),
        "loss": _number(record.of_model("loss"), ".4f"),
        "rounds": f"{len(rounds)}/{record.config.rounds}",
        "delta": f"{privacy.delta:g}",
        "accountant": privacy.accountant,
        "clip norm": _number(rounds[-1].get("clip_norm"), ".4g"),
        "replies": f"{statistics.fmean(row.get('replies') or 0.0 for row in rounds):.1f}",
        "seconds": f"{sum(row.get('seconds') or 0.0 for row in rounds):.1f}",
        "noise": "secure" if seed is None else f"seed {seed}",
    }


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def repetitions_table(records: Sequence[RunRecord]) -> list[Row]:
    """A row for each setting that was run more than once, with the spread."""
    mean, rows = f"{score_word(records)}, mean", []
    for group in group_runs(records):
        if len(scores := group.scores) > 1:
            numbers = {mean: group.score, "standard deviation": statistics.stdev(scores)}
            numbers |= {"lowest": min(scores), "highest": max(scores)}
            written = {name: f"{value:.4f}" for name, value in numbers.items()}
            rows.append({"setting": group.label, "runs": str(len(scores)), **written})
    return rows


def ratings_table(record: RunRecord) -> list[Row]:
    """Every rating of a run with its standard errors; empty if clients rated nothing."""
    return [
        {
            "round": str(number),
            "number": rated.name,
            "value": f"{rated.value:.4f}" if rated.known else "not known: the noise leaves nothing to read",
            "standard error": f"{rated.error:.4f}" if rated.known else "",
            "standard error by noise alone": _number(rated.by_noise, ".4f") if rated.known else "",
        }
        for number, rated in record.ratings
    ]
