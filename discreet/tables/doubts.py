"""Cells that may mean several things, or that need a key of data.toml which only a person can
choose. A proposal leaves their column out and says why."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

from discreet.data.cell_reading import ABOVE, Marks, day_in
from discreet.data.empty_cells import is_empty
from discreet.tables.written_numbers import (
    COMMA,
    COMMA_GROUPS,
    POINT,
    POINT_GROUPS,
    SPACE_GROUPS,
    WORDS,
    marks_in,
    written_numbers,
)

# A space tells a unit from a code such as 1a.
WITH_UNIT = re.compile(r"[<\u2264]?\s*[+\u2212-]?\d[\d.,]*(?:\s+([^\W\d_][^\s\d]*)|\s*(%))")
SIGN_AFTER = re.compile(r"\d[\d.,]*\s*[+\u2212-]")
SHORT_YEAR = re.compile(r"\d{1,2}([./-])\d{1,2}\1\d\d", re.ASCII)
SHORT_FORMATS = ("%d.%m.%y", "%d/%m/%y", "%m/%d/%y", "%d-%m-%y", "%m-%d-%y", "%y-%m-%d")
# Formats that differ in the place of day and month alone.
TWINS = (("%d/%m/%Y", "%m/%d/%Y"), ("%d-%m-%Y", "%m-%d-%Y"))
EXCEL_TEXT = re.compile(r'="[^"]*"')
EITHER_MARKS = (Marks(",", "."), Marks(".", ","))
MIXED_ORDER = "has the month before the day, and others after it: write all in one order"


@dataclass(frozen=True)
class Doubt:
    """The first row, from 0, whose cell is doubtful, and the reason with the remedy."""

    row: int
    why: str


_Found = tuple[Callable[[str], object], str]  # true for a doubtful cell, and the reason


def doubt_in(cells: Sequence[str], marks: Marks) -> Doubt | None:
    """The doubt about a column that is no number and no date as it stands, if there is one."""
    full = [cell.strip() for cell in cells if not is_empty(cell)]
    kinds = (
        _both_marks(full),
        _commas(full, marks),
        _other_marks(full, marks),
        _limits(full, marks),
    )
    for fits, why in chain(*kinds, _signs(full, marks), _units(full), _days(full)):
        return Doubt(first_row(cells, fits), f"{why}, and check again")
    return None


def excel_doubt(cells: Sequence[str]) -> Doubt | None:
    """The doubt about cells such as ="044", if there are any."""
    if not any(EXCEL_TEXT.fullmatch(cell.strip()) for cell in cells):
        return None
    why = 'has =" before and " after it, as Excel writes text: take both out, and check again'
    return Doubt(first_row(cells, EXCEL_TEXT.fullmatch), why)


def point_doubt(cells: Sequence[str]) -> Doubt | None:
    """The doubt about numbers such as 1.234, in a table with decimal commas and decimal points."""
    full = [cell.strip() for cell in cells if not is_empty(cell)]
    groups = {cell for cell in full if POINT_GROUPS.fullmatch(cell)}
    if not groups or any("." in cell for cell in full if cell not in groups):
        return None
    why = (
        "has a point before three digits, as 1.234, in a table with decimal commas and points: "
        "write one mark in the whole table, and check again"
    )
    return Doubt(first_row(cells, POINT_GROUPS.fullmatch), why)


def first_row(cells: Sequence[str], fits: Callable[[str], object]) -> int:
    return next(at for at, cell in enumerate(cells) if fits(cell.strip()))


def _both_marks(full: Sequence[str]) -> Iterator[_Found]:
    """Numbers of one column with decimal commas and decimal points."""
    numbers = [cell for cell in full if any(written_numbers([cell], each) for each in EITHER_MARKS)]
    if len(numbers) > len(full) / 2 and marks_in({"": numbers}).both:
        one = "write one mark in the whole table"
        yield COMMA.match, f"has a comma, and other cells of the column a decimal point: {one}"


def _commas(full: Sequence[str], marks: Marks) -> Iterator[_Found]:
    has_comma = "," in (marks.decimal, marks.thousands)
    if not has_comma and any(map(COMMA_GROUPS.fullmatch, full)):
        choice = 'write decimal = "," or thousands = ","'
        yield COMMA_GROUPS.fullmatch, f"has a comma before three digits: {choice}"


def _other_marks(full: Sequence[str], marks: Marks) -> Iterator[_Found]:
    """Numbers by other marks than those of the table."""
    has_commas = any("," in cell for cell in full)
    has_points = any(map(POINT.match, full))
    if has_commas and marks.decimal == "." and written_numbers(full, Marks(",", marks.thousands)):
        one = 'write decimal = "," if no column has points, or write points in the table'
        yield (lambda cell: "," in cell), f"has decimal commas: {one}"
    if has_points and marks.decimal == "," and written_numbers(full, Marks(".", "")):
        one = "write one mark in the whole table"
        yield POINT.match, f"has decimal points, and the table has commas: {one}"
    spaced = {found[1] for cell in full if (found := SPACE_GROUPS.fullmatch(cell))}
    if any(written_numbers(full, Marks(decimal, mark)) for mark in spaced for decimal in ".,"):
        one = "write thousands for it, or write all numbers of the table with the same sign"
        yield SPACE_GROUPS.fullmatch, f"has a space before each three digits: {one}"


def _limits(full: Sequence[str], marks: Marks) -> Iterator[_Found]:
    """Numbers of which some are above a limit."""
    others = [cell for cell in full if not ABOVE.fullmatch(cell)]
    if len(others) < len(full) and written_numbers(others, marks):
        yield ABOVE.fullmatch, "is above a limit: write the limit alone"


def _signs(full: Sequence[str], marks: Marks) -> Iterator[_Found]:
    """Numbers with a sign after them here and there."""
    others = [cell for cell in full if not SIGN_AFTER.fullmatch(cell)]
    if 0 < len(others) < len(full) and written_numbers(others, marks):
        yield SIGN_AFTER.fullmatch, "has a sign after a number: write it before"


def _units(full: Sequence[str]) -> Iterator[_Found]:
    """Numbers with several units, or with a unit here and there."""
    numbers = [cell for cell in full if cell.casefold() not in WORDS]
    found = {cell: WITH_UNIT.fullmatch(cell) for cell in numbers}
    units = {match[1] or match[2] for match in found.values() if match}
    bare = [cell for cell, match in found.items() if not match]
    either = (Marks(",", "."), Marks())
    are_numbers = all(any(written_numbers([cell], marks) for marks in either) for cell in bare)
    if not units or not are_numbers:
        return
    levels = 'list them as levels: { kind = "category", levels = [...] }'
    if len(units) > 1:
        yield WITH_UNIT.fullmatch, f"has one of several units: write all in one, or {levels}"
    else:
        yield WITH_UNIT.fullmatch, f"has a unit, and others none: write it to all, or {levels}"


def _days(full: Sequence[str]) -> Iterator[_Found]:
    """Dates with years of two digits, or with the day here before and there after the month."""
    short = [form for form in SHORT_FORMATS if _fits((form,), full)]
    if short and all(map(SHORT_YEAR.fullmatch, full)):
        forms = " or ".join(f'format = "{form}"' for form in short)
        years = "by which 69 to 99 are 1969 to 1999 and 00 to 68 are 2000 to 2068"
        yield SHORT_YEAR.fullmatch, f"has a year of two digits: write four, or {forms}, {years}"
    for twins in TWINS:
        one, other = ({cell for cell in full if _fits((form,), [cell])} for form in twins)
        if one | other == {*full} and one - other and other - one:
            month_first = other - one
            yield month_first.__contains__, MIXED_ORDER


def _fits(formats: tuple[str, ...], cells: Sequence[str]) -> bool:
    with suppress(ValueError):
        return bool([day_in(cell, formats) for cell in cells])
    return False
