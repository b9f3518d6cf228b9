"""Runs, repetitions and ratings as rows: for the terminal, for a CSV file, for the page."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from discreet.federated.csv_text import csv_text
from discreet.reporting.records import (
    RunRecord,
    group_runs,
    matters,
    score_word,
    setting_text,
    short_names,
    tried_settings,
)
from discreet.settings.privacy import GUARANTEES
from discreet.tasks.scores import ERROR, score_columns


@dataclass(frozen=True)
class Table:
    """Cells as text; every row has one for each column."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @property
    def same(self) -> dict[str, str]:
        """The columns in which all rows say the same, and what; empty if there is a single row."""
        if len(self.rows) < 2:
            return {}
        columns = zip(self.columns, zip(*self.rows, strict=True), strict=True)
        return {name: cells[0] for name, cells in columns if len(set(cells)) == 1}

    def without(self, names: Collection[str]) -> Table:
        """The other columns."""
        kept = [number for number, name in enumerate(self.columns) if name not in names]
        rows = tuple(tuple(row[number] for number in kept) for row in self.rows)
        return Table(tuple(self.columns[number] for number in kept), rows)

    def fitting(self, width: int) -> tuple[Table, list[str]]:
        """The first columns, as many as `width` letters hold with two between them, and the names of the others.

        The first two are always there.
        """
        cells = zip(self.columns, *self.rows, strict=True)
        ends = list(itertools.accumulate(max(map(len, column)) + 2 for column in cells))
        left = [name for name, end in zip(self.columns[2:], ends[2:], strict=True) if end - 2 > width]
        return self.without(left), left

    def to_csv(self) -> str:
        """CSV with a header."""
        return csv_text([self.columns, *self.rows])


def runs_table(records: Sequence[RunRecord]) -> Table:
    """A row for each run: scores and loss of its model, what it spent, what was tried, and the rest.

    A score that clients gave in one of the runs is followed by its standard error.
    """
    tried = tried_settings(records)
    short = short_names(tried)
    given = {name for record in records for row in record.rounds for name, value in row.items() if value is not None}
    scores = [
        name
        for score in score_columns(record.rounds[-1] for record in records)
        for name in (score, f"{score}{ERROR}")
        if name == score or name in given
    ]
    spent = tuple(f"epsilon {name}" for name in GUARANTEES)
    rest = ("loss", "rounds", "delta", "accountant", "clip norm", "replies", "seconds", "noise")
    columns = ("run", *scores, *spent, *(short[name] for name in tried), *rest)
    return Table(columns, tuple(_row(record, scores, tried) for record in records))


def _row(record: RunRecord, scores: Sequence[str], tried: Sequence[str]) -> tuple[str, ...]:
    privacy = record.config.privacy
    return (
        record.name,
        *(_number(record.of_model(name), ".4f") for name in scores),
        *(_number(record.epsilon(name), ".4g") for name in GUARANTEES),
        *(setting_text(record.settings.get(name)) if matters(record, name) else "" for name in tried),
        _number(record.of_model("loss"), ".4f"),
        f"{len(record.rounds)}/{record.config.rounds}",
        f"{privacy.delta:g}",
        privacy.accountant,
        _number(record.rounds[-1].get("clip_norm"), ".4g"),
        f"{record.total('replies') / len(record.rounds):.1f}",
        f"{record.total('seconds'):.1f}",
        f"seed {record.config.seed}" if record.protects_nobody else "secure",
    )


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def swept_line(records: Sequence[RunRecord]) -> str:
    """The settings in which the runs differ, by their whole names; empty if there are none."""
    tried = tried_settings(records)
    short = short_names(tried)
    return ", ".join(name if short[name] == name else f"{short[name]} is {name}" for name in tried)


def repetitions_table(records: Sequence[RunRecord]) -> Table | None:
    """A row for each setting that was run more than once, with the spread; None if none was."""
    rows = []
    for group in group_runs(records):
        if len(scores := group.scores) > 1:
            numbers = (group.score, statistics.stdev(scores), min(scores), max(scores))
            rows.append((group.label, str(len(scores)), *(f"{value:.4f}" for value in numbers)))
    columns = ("setting", "runs", f"{score_word(records)}, mean", "standard deviation", "lowest", "highest")
    return Table(columns, tuple(rows)) if rows else None


def ratings_table(record: RunRecord) -> Table | None:
    """Every rating of a run with its standard errors; None if clients rated nothing."""
    rows = []
    for number, rated in record.ratings:
        told = ("not known: the noise leaves nothing to read", "", "")
        if rated.known:
            told = (f"{rated.value:.4f}", f"{rated.error:.4f}", _number(rated.by_noise, ".4f"))
        rows.append((str(number), rated.name, *told))
    columns = ("round", "number", "value", "standard error", "standard error by noise alone")
    return Table(columns, tuple(rows)) if rows else None
