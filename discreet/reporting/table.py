"""The runs as rows: for the terminal, for a CSV file, for the page."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from discreet.federated.csv_text import csv_text
from discreet.federated.guarantees import GUARANTEES
from discreet.reporting.records import (
    SCORE,
    Group,
    RunRecord,
    group_runs,
    matters,
    score_word,
    setting_text,
    short_names,
    tried_settings,
)
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


def runs_table(records: Sequence[RunRecord]) -> Table:
    """A row for each run: scores and loss of its model, what it spent, what was tried, and the rest."""
    tried = tried_settings(records)
    short = short_names(tried)
    given = score_columns(record.rounds[-1] for record in records)
    scores = [name for each in given for name in (each, *_error_of(each, records))]
    columns = ("run", *scores, *_SPENT, *(short[name] for name in tried), *_REST)
    rows = ((record.name, *_results(record, scores), *_tried(record, tried), *_rest(record)) for record in records)
    return Table(columns, tuple(rows))


_SPENT = tuple(f"epsilon {name}" for name in GUARANTEES)
_REST = ("loss", "rounds", "delta", "accountant", "clip norm", "replies", "seconds", "noise")


def _error_of(name: str, records: Sequence[RunRecord]) -> list[str]:
    """The column of a score's standard error, if clients gave the score in one of the runs."""
    error = f"{name}{ERROR}"
    return [error] if any(row.get(error) is not None for record in records for row in record.rounds) else []


def _tried(record: RunRecord, tried: Sequence[str]) -> list[str]:
    return [setting_text(record.settings.get(name)) if matters(record, name) else "" for name in tried]


def _results(record: RunRecord, scores: Sequence[str]) -> tuple[str, ...]:
    spent = (_number(record.epsilon(name), ".4g") for name in GUARANTEES)
    return (*(_number(record.of_model(name), ".4f") for name in scores), *spent)


def _rest(record: RunRecord) -> tuple[str, ...]:
    privacy = record.config.privacy
    return (
        _number(record.of_model("loss"), ".4f"),
        f"{len(record.rounds)}/{record.config.rounds}",
        f"{privacy.delta:g}",
        privacy.accountant,
        _number(record.last("clip_norm"), ".4g"),
        _number(record.total("replies") / len(record.rounds), ".1f"),
        _number(record.total("seconds"), ".1f"),
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
    repeated = [group for group in group_runs(records) if len(group.records) > 1]
    if not repeated:
        return None
    columns = ("setting", "runs", f"{score_word(records)}, mean", "standard deviation", "lowest", "highest")
    return Table(columns, tuple(_spread(group) for group in repeated))


def _spread(group: Group) -> tuple[str, ...]:
    values = group.values(SCORE)
    numbers = (statistics.fmean(values), statistics.stdev(values), min(values), max(values))
    return (group.label, str(len(values)), *(f"{value:.4f}" for value in numbers))


def to_csv(table: Table) -> str:
    """The table as CSV with a header."""
    return csv_text([table.columns, *table.rows])
