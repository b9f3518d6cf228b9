"""The cells of a table as people write them: empty ones, numbers, days and words.

This file imports nothing from Discreet: `discreet export` copies it beside a model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

import numpy as np

# Python's float would also take 1_000, infinity, and digits of any script.
PLAIN = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
MINUS = "\u2212"  # as word processors write it
GROUPS = re.compile(r"[+-]?\d{1,3}(\0\d{3})+", re.ASCII)
ISO_DAY = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
THOUSANDS = re.compile(r"[+-]?\d{1,3}([.,' \u00a0\u2009\u202f]\d{3})+([.,]\d+)?")
ABOVE = re.compile(r"[>\u2265]\s*[\d.,]+")
OTHER_UNIT = re.compile(r"[+-]?\d[\d.,]*\s*[^\W\d_][^\d]*|[+-]?\d[\d.,]*\s*%")


class CellError(ValueError):
    """A cell that is missing or does not fit: its row, counted from 0, the problem, and the row of
    another cell that it does not fit to. It does not contain the value."""

    def __init__(self, row: int, problem: str, other: int | None = None) -> None:
        super().__init__(f"row {row}: {problem}")
        self.row = row
        self.other = other
        self.problem = problem


@dataclass(frozen=True)
class Marks:
    """The decimal mark and the thousands separator in numbers that are text; empty: none."""

    decimal: str = "."
    thousands: str = ""


def number_in(cell: Any, marks: Marks, unit: str = "") -> float:
    """The number in a cell, without its unit. ValueError: there is none; the message is what to
    do."""
    value = math.nan
    written = ""
    if isinstance(cell, str):
        written = cell.strip().removesuffix(unit).rstrip().replace(MINUS, "-")
        text = _plain(written, marks)
        if PLAIN.fullmatch(text):
            value = float(text)
    else:
        with suppress(TypeError, ValueError, OverflowError):
            value = float(cell)
    if math.isfinite(value):
        return value
    raise ValueError(f"is not a number{_hint(written, marks, unit)}")


def _plain(written: str, marks: Marks) -> str:
    """A number with a point and no thousands separators, if it is written with the marks;
    otherwise a text that is no number."""
    if "." in written and "." not in (marks.decimal, marks.thousands):
        return ""
    whole, mark, rest = written.partition(marks.decimal)
    if marks.thousands and marks.thousands in whole:
        if not GROUPS.fullmatch(whole.replace(marks.thousands, "\0")):
            return ""
        whole = whole.replace(marks.thousands, "")
    if not mark:
        return whole
    return f"{whole}.{rest}"


def _hint(written: str, marks: Marks, unit: str) -> str:
    if marks.decimal == "." and re.fullmatch(r"[+-]?\d*,\d+", written):
        return ': write decimal = "," in data.toml, or thousands = "," if 1,234 is 1234'
    if THOUSANDS.fullmatch(written):
        return ": write it without thousands separators, or thousands in data.toml"
    if marks.decimal == "," and re.fullmatch(r"[+-]?\d*\.\d+", written):
        return ': numbers have a decimal comma here (decimal = ",")'
    if written and not written.isascii() and any(map(str.isdecimal, written)):
        return ": write it with the digits 0 to 9"
    if ABOVE.fullmatch(written):
        return ', but above a limit, as ">500" is: write the limit alone'
    if unit and OTHER_UNIT.fullmatch(written):
        return f": its unit is not {unit}: convert it"
    if OTHER_UNIT.fullmatch(written):
        return ": write it without a unit, or write unit for the column in data.toml"
    return "; words need a column with kind = category"


def day_in(cell: Any, formats: Sequence[str]) -> float:
    """The ordinal of the day in a cell, in one of several formats of strptime or, with none, of
    ISO. ValueError: there is none, or two; the message is what to do."""
    if isinstance(cell, date):  # a datetime is one, and so is a Timestamp of pandas
        return float(cell.toordinal())
    text = str(cell).strip()
    days = {day for form in formats or (None,) if (day := _day(text, form)) is not None}
    if len(days) == 1:
        return float(days.pop())
    known = " or ".join(formats)
    if days:
        raise ValueError(f"is another day in each of the formats {known}: keep one of them")
    if formats:
        known = f"in the format {known}"
    else:
        known = "such as 2022-01-31"
    raise ValueError(f'is not a date {known}: write its format, such as format = "%d.%m.%Y"')


def _day(text: str, form: str | None) -> int | None:
    if not text.isascii() and any(map(str.isdecimal, text)):
        return None
    with suppress(ValueError):
        if form is not None:
            return datetime.strptime(text, form).toordinal()
        if ISO_DAY.match(text):
            return datetime.fromisoformat(text).toordinal()
    return None


def word_in(cell: Any) -> str:
    """A level as text: 1.0 in a column of numbers is 1."""
    whole = isinstance(cell, float | np.floating) and float(cell).is_integer()
    if whole:
        return str(int(cell))
    return str(cell).strip()
