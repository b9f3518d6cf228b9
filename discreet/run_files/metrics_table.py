"""The rows of metrics.csv as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from discreet.run_files.csv_text import cell_text, csv_text
from discreet.run_files.scores import score_columns

METRICS = (  # after round, loss and the scores of the task
    "clip_norm",
    "fraction_below",
    "cohort",
    "replies",
    "epsilon_user",
    "epsilon_example",
    "epsilon_local",
    "seconds",
)
END = "\r\n"  # of a line


def columns_of(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """The columns of the rows: those of every run, then any others in the rows."""
    names = [name for row in rows for name in row]
    return [*dict.fromkeys(["round", "loss", *score_columns(rows), *METRICS, *names])]


def table_of(rows: Sequence[Mapping[str, object]]) -> str:
    """The rows as CSV below a header, one cell per column."""
    columns = columns_of(rows)
    header = csv_text([columns], end=END)
    return header + "".join(line_of(row, columns) for row in rows)


def line_of(row: Mapping[str, object], columns: Sequence[str]) -> str:
    """A row as a line of CSV, one cell per column."""
    cells = [cell_text(row.get(name), digits=10) for name in columns]
    return csv_text([cells], end=END)
