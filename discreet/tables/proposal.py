"""Proposes a `data.toml` for a CSV file from its names, types and levels."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date, datetime

from discreet.data.csv_table import CsvTable
from discreet.data.encoding import is_empty
from discreet.data.targets import FolderError

MOST_LEVELS = 20
MOST_CLASSES = 10
DATE_FORMATS = ("%Y-%m-%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d", "%d-%m-%Y")
OWNERS = re.compile(
    r"(patient|person|user|customer|client|member|subject|pupil|student)(_?(id|no|nr|number))?",
    re.I,
)
TARGETS = re.compile(
    r"(target|label|class|outcome|y|readmitted|churn|default|diagnosis|response)", re.I
)
WARNING = """\
# Proposed by `discreet data check` from {file}, which it has READ: the ranges, levels and classes
# below come from the data. They are not private, and no epsilon covers them. Replace them, column
# by column, by what is public: a questionnaire, a guideline, the range of an instrument. Take the
# name of each column that you have replaced out of `unconfirmed`. Until it is empty, no run starts.
"""


@dataclass(frozen=True)
class Guess:
    """A guess at the kind of a column.

    Attributes:
      line: its line in data.toml, without its name; empty if the column is left out.
      why: a comment with the reason.
    """

    line: str
    why: str = ""


@dataclass(frozen=True)
class Proposal:
    """A proposed description: its text, the columns to confirm, and the number of owners."""

    text: str
    unconfirmed: tuple[str, ...]
    owner: str | None
    num_owners: int


def propose(table: CsvTable, *, target: str | None = None, owner: str | None = None) -> Proposal:
    """A proposed description of a CSV file. Raises FolderError: it can't be read, or `target` or
    `owner` is not one of its columns."""
    columns = {name: column.to_pylist() for name, column in table.columns(as_text=True).items()}
    for name in (target, owner):
        if name is not None and name not in columns:
            raise FolderError(f"{table.path} has no column {name}; there are {', '.join(columns)}")
    names = list(columns)
    owner = owner or _named(OWNERS, names) or None
    target = target or _named(TARGETS, [name for name in names if name != owner]) or names[-1]
    if _has_decimal_commas(columns):
        decimal = ","
    else:
        decimal = "."
    inputs = {name: cells for name, cells in columns.items() if name not in (target, owner)}
    guesses = {name: guessed_column(name, cells, decimal) for name, cells in inputs.items()}
    head = _Head(table, decimal, target, owner)
    told, of_target = _target_lines(columns[target], target, decimal)
    unconfirmed = (*(name for name, each in guesses.items() if each.line), *of_target)
    lines = [WARNING.format(file=table.path.name), f"unconfirmed = {_listed(unconfirmed)}", ""]
    lines += [*head.lines(), *told, "", "[columns]", *_column_lines(guesses)]
    if owner:
        owners = len({cell for cell in columns[owner] if not is_empty(cell)})
    else:
        owners = 0
    return Proposal("\n".join(lines) + "\n", unconfirmed, owner, owners)


def _named(pattern: re.Pattern[str], names: Sequence[str]) -> str | None:
    return next((name for name in names if pattern.fullmatch(name.strip())), None)


def _has_decimal_commas(columns: Mapping[str, Sequence[str]]) -> bool:
    cells = [
        cell.strip() for column in columns.values() for cell in column if isinstance(cell, str)
    ]
    commas = any(re.fullmatch(r"[+-]?\d+,\d+", cell) for cell in cells)
    return commas and not any(re.fullmatch(r"[+-]?\d+\.\d+", cell) for cell in cells)


@dataclass(frozen=True)
class _Head:
    """The first lines of a description: the file and its format, the target and the owner."""

    table: CsvTable
    decimal: str
    target: str
    owner: str | None

    def lines(self) -> Iterator[str]:
        folder = self.table.path.parent
        yield 'format = "csv"'
        yield f"file = {json.dumps(self.table.path.name)}"
        if (folder / "test.csv").is_file() and self.table.path.name != "test.csv":
            yield 'test = "test.csv"          # public: nobody in it is protected'
        if self.table.encoding is not None:
            yield f"encoding = {json.dumps(self.table.encoding)}"
        if self.decimal != ".":
            yield f"decimal = {json.dumps(self.decimal)}"
        yield f"target = {json.dumps(self.target)}"
        if self.owner is not None:
            yield f"owner = {json.dumps(self.owner)}       # each of them becomes a client"
        else:
            yield '# owner = "..."           # the column of whose each row is, if there is one'


def _target_lines(
    cells: Sequence[str], name: str, decimal: str
) -> tuple[list[str], tuple[str, ...]]:
    """The lines of the target, and its name if they were read from the data."""
    known = sorted({cell.strip() for cell in cells if not is_empty(cell)})
    numbers = _numbers(known, decimal)
    if numbers is not None and len(known) > MOST_CLASSES:
        low, high = _round_range(numbers)
        return [f"target_low = {low:g}", f"target_high = {high:g}"], (name,)
    if not 2 <= len(known) <= 1000:
        raise FolderError(f"the column {name} has {len(known)} values: name another --target")
    return [f"classes = {_listed(known)}"], (name,)


def _column_lines(guesses: Mapping[str, Guess]) -> Iterator[str]:
    for name, each in guesses.items():
        if re.fullmatch(r"[A-Za-z0-9_-]+", name):
            key = name
        else:
            key = json.dumps(name)
        if each.why:
            note = f"  # {each.why}"
        else:
            note = ""
        yield f"{key} = {each.line}{note}" if each.line else f"# {key} is left out: {each.why}"


def guessed_column(name: str, cells: Sequence[str], decimal: str) -> Guess:
    """The most likely kind of a column, from its cells as text."""
    full = [cell.strip() for cell in cells if not is_empty(cell)]
    known = set(full)
    some_empty = len(full) < len(cells)
    if not full:
        return Guess("", "it is empty")
    numbers = _numbers(full, decimal)
    if numbers is not None:
        if len(known) == len(cells) > MOST_LEVELS and re.search(
            r"(id|no|nr|number|key)$", name, re.I
        ):
            return Guess("", "every row has a different number, like an identifier")
        return _number_guess(numbers, some_empty)
    days = next((found for form in DATE_FORMATS if (found := _days(full, form))), None)
    if days is not None:
        return replace(_date_guess(*days), line=_with_missing(_date_guess(*days).line, some_empty))
    if len(known) <= MOST_LEVELS and len(known) < max(len(full) / 2, 3):
        if some_empty:
            empty = ', missing = "category"'
        else:
            empty = ""
        listed = _listed(sorted(known))
        return Guess(f'{{ kind = "category", levels = {listed}{empty} }}' if some_empty else listed)
    return Guess(
        "", f'text of {len(known)} kinds: {{ kind = "text", width = 64 }} would hash its words'
    )


def _with_missing(line: str, some_empty: bool) -> str:
    if some_empty:
        return line.replace(" }", ', missing = "middle" }')
    return line


def _number_guess(numbers: Sequence[float], some_empty: bool) -> Guess:
    low, high = (0.0, 1.0) if {*numbers} <= {0.0, 1.0} else _round_range(numbers)
    if not some_empty:
        return Guess(f"[{low:g}, {high:g}]")
    return Guess(f'{{ kind = "number", low = {low:g}, high = {high:g}, missing = "middle" }}')


def _date_guess(form: str, first: date, last: date) -> Guess:
    low = date(first.year, 1, 1)
    high = date(last.year, 12, 31)
    if form == DATE_FORMATS[0]:
        written = ""
    else:
        written = f', format = "{form}"'
    return Guess(f'{{ kind = "date", low = {low}, high = {high}{written} }}')


def _numbers(cells: Sequence[str], decimal: str) -> list[float] | None:
    with suppress(ValueError):
        found = [float(cell.replace(decimal, ".")) for cell in cells]
        if all(map(math.isfinite, found)):
            return found
        return None
    return None


def _days(cells: Sequence[str], form: str) -> tuple[str, date, date] | None:
    with suppress(ValueError):
        read: Callable[[str], date] = lambda cell: datetime.strptime(cell, form).date()  # noqa: E731
        days = [read(cell) for cell in cells]
        return form, min(days), max(days)
    return None


def _round_range(numbers: Sequence[float]) -> tuple[float, float]:
    """A range with round ends that contains the numbers, so that it reveals less about the smallest
    and the largest.

    >>> _round_range([19, 93])
    (10.0, 100.0)
    """
    low = min(numbers)
    high = max(numbers)
    unit = 10 ** math.floor(math.log10(max(high - low, abs(high) / 10, 1e-9)))
    return math.floor(low / unit) * unit * 1.0, (math.floor(high / unit) + 1) * unit * 1.0


def _listed(words: Sequence[str]) -> str:
    return f"[{', '.join(json.dumps(word, ensure_ascii=False) for word in words)}]"
