"""CSV files in which a spreadsheet finds no formula: any rows, and roc.csv of a run folder."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import astuple, fields
from pathlib import Path

from discreet.federated.run_folder import replace_file
from discreet.tasks.noised_answers import RocPoint

FORMULA = ("=", "+", "-", "@", "\t", "\r")
ROC_FILE = "roc.csv"


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """A line for each row. A text that is no number and begins as a formula gets an apostrophe before it.

    >>> csv_text([["=1+1", "-0.5", -1]])
    "'=1+1,-0.5,-1\\n"
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([_plain(cell) for cell in row] for row in rows)
    return text.getvalue()


def _plain(cell: object) -> object:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) and not _is_number(cell) else cell


def _is_number(text: str) -> bool:
    try:
        return float(text) == float(text)
    except ValueError:
        return False


def write_roc(folder: Path, number: int, points: Sequence[RocPoint]) -> None:
    """Adds to roc.csv the ROC curves of the model after a round, in place of those that are there of it: a row a point.

    Without points there is no file.
    """
    path, kept = folder / ROC_FILE, list[list[str]]()
    if path.exists():
        kept = [row for row in csv.reader(path.read_text().splitlines()[1:]) if row[:1] != [str(number)]]
    if kept or points:
        header = ["round", *(field.name for field in fields(RocPoint))]
        replace_file(path, csv_text([header, *kept, *((number, *astuple(point)) for point in points)]).encode())
