"""The cells of a table as people write them: empty ones, numbers, days and words.

This file imports nothing from Discreet: `discreet export` copies it beside a model.
"""

from __future__ import annotations

import math
import re
from datetime import date, datetime
from typing import Any

import numpy as np

# The texts that count as an empty cell, unless a column lists them as levels.
EMPTY = frozenset(("", "na", "n/a", "nan", "null", "#n/a"))
THOUSANDS = re.compile(r"[+-]?\d{1,3}([.,' \u00a0]\d{3})+([.,]\d+)?")


class CellError(ValueError):
    """A cell that is missing or does not fit: its row, counted from 0, and the problem. It does not
    contain the value."""

    def __init__(self, row: int, problem: str) -> None:
        super().__init__(f"row {row}: {problem}")
        self.row = row
        self.problem = problem


def is_empty(cell: object) -> bool:
    """True for an empty cell.

    >>> [is_empty(cell) for cell in (None, float("nan"), " NA ", "none", 0)]
    [True, True, True, False, False]
    """
    if isinstance(cell, str):
        return cell.strip().lower() in EMPTY
    if cell is None or type(cell).__name__ == "NAType":  # pandas' NA, which has no truth value
        return True
    return cell != cell


def number_in(cell: Any, decimal: str) -> float:
    """The number in a cell. ValueError: there is none; the message is what to do."""
    if isinstance(cell, str):
        text = cell.strip().replace(decimal, ".")
    else:
        text = cell
    try:
        value = float(text)
    except (TypeError, ValueError):
        value = math.nan
    if math.isfinite(value):
        return value
    comma = isinstance(cell, str) and decimal == "." and re.fullmatch(r"[+-]?\d*,\d+", cell.strip())
    if comma:
        hint = ': write decimal = "," in data.toml'
    elif isinstance(cell, str) and THOUSANDS.fullmatch(cell.strip()):
        hint = ": write it without thousands separators"
    else:
        hint = "; words need a column with kind = category"
    raise ValueError(f"is not a number{hint}")


def day_in(cell: Any, form: str | None) -> float:
    """The ordinal of the day in a cell, in a format of strptime or, with None, of ISO. ValueError:
    there is none; the message is what to do."""
    try:
        if isinstance(cell, date):  # a datetime is one, and so is a Timestamp of pandas
            return float(cell.toordinal())
        text = str(cell).strip()
        if form:
            read = datetime.strptime(text, form)
        else:
            read = datetime.fromisoformat(text)
        return float(read.toordinal())
    except ValueError:
        if form:
            known = f"in the format {form}"
        else:
            known = "such as 2022-01-31"
        raise ValueError(
            f'is not a date {known}: write its format, such as format = "%d.%m.%Y"'
        ) from None


def word_in(cell: Any) -> str:
    """A level as text: 1.0 in a column of numbers is 1."""
    whole = isinstance(cell, float | np.floating) and float(cell).is_integer()
    if whole:
        return str(int(cell))
    return str(cell).strip()
