"""The cells of a table as numbers, encoded with public facts about each column only.

This file imports nothing from Discreet: `discreet export` copies it beside a model, so that users
of the model encode rows as the run did.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import date, datetime
from itertools import pairwise
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

NUMBER = "number"
CATEGORY = "category"
DATE = "date"
TEXT = "text"
KINDS = (NUMBER, CATEGORY, DATE, TEXT)
MIDDLE = "middle"
MOST_CURVES = 20
# The keys of a column that say how one site writes it. A model needs none of them.
LOCAL = ("named", "words", "factor", "format")
Pair = tuple[str, str]  # the names of two columns
# The texts that count as an empty cell, unless a column lists them as levels.
EMPTY = frozenset(("", "na", "n/a", "nan", "null", "#n/a"))
_WORD = re.compile(r"\w+")
THOUSANDS = re.compile(r"[+-]?\d{1,3}([.,' \u00a0]\d{3})+([.,]\d+)?")


class CellError(ValueError):
    """A cell that is missing or does not fit: its row, counted from 0, and the problem. It does not
    contain the value."""

    def __init__(self, row: int, problem: str) -> None:
        super().__init__(f"row {row}: {problem}")
        self.row = row
        self.problem = problem


@dataclass(frozen=True)
class Column:
    """The public facts about a column.

    Attributes:
      kind: number, category, date or text.
      low, high: the range of a number, or the first and the last day, as 2022-01-31.
      missing: the replacement of an empty cell. For a number or a date: "middle" or a value, and an
        additional column marks the empty cells. For a category: one of its levels, or "category",
        an additional level. None: an empty cell is refused.
      levels: the levels of a category; one additional output stands for all others.
      format: the format of a date for Python's strptime; None: 2022-01-31, with or without a time.
      width: the number of columns into which the words of a text are hashed.
      curves: the number of smooth curves of a number or a date, by which a linear model bends.
      points: public values of a number, rising from low to high, that are mapped to equal steps
        from -1 to 1, such as quantiles from the literature.
      bins: public values within low..high that cut a number into groups; in place of its position.
      rises, falls: what a linear model predicts never falls, or never rises, along the column.
      named, words, factor: how this site writes it, of which the model knows nothing: the column's
        name in the file; the level that a word of the file stands for; and the number by which a
        cell is multiplied, for another unit.
    """

    name: str
    kind: str
    low: float | str | None = None
    high: float | str | None = None
    missing: float | str | None = None
    levels: tuple[str, ...] = ()
    format: str | None = None
    width: int = 0
    curves: int = 0
    points: tuple[float, ...] = ()
    bins: tuple[float, ...] = ()
    rises: bool = False
    falls: bool = False
    named: str | None = None
    words: tuple[tuple[str, str], ...] = ()
    factor: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"{self.name}: kind must be one of {', '.join(KINDS)} (got {self.kind})"
            )
        allowed = {"name", "kind", "named", *_KEYS[self.kind]}
        wrong = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
        wrong = [key for key in wrong if key not in allowed]
        if wrong:
            raise ValueError(f"{self.name}: {wrong[0]} does not go with kind = {self.kind}")
        _CHECKS[self.kind](self)

    @property
    def in_file(self) -> str:
        """The column's name in this site's files."""
        return self.named or self.name

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the numbers that a cell is encoded as."""
        if self.kind == CATEGORY:
            own = [f"{self.name} is {level}" for level in self.levels]
            if self.missing == CATEGORY:
                empty = [f"{self.name} is empty"]
            else:
                empty = []
            return (*own, f"{self.name} is another", *empty)
        if self.kind == TEXT:
            return tuple(f"{self.name} word {place}" for place in range(self.width))
        if self.missing is None:
            return self._positions()
        return (*self._positions(), f"{self.name} is empty")

    def _positions(self) -> tuple[str, ...]:
        """The names of the numbers that say where in its range a cell is."""
        if not self.bins:
            bends = (f"{self.name} curve {number}" for number in range(1, self.curves + 1))
            return (self.name, *bends)
        inner = (f"{low:g} to {high:g}" for low, high in pairwise(self.bins))
        groups = (f"below {self.bins[0]:g}", *inner, f"from {self.bins[-1]:g}")
        return tuple(f"{self.name} {group}" for group in groups)

    @property
    def crossed(self) -> tuple[str, ...]:
        """The outputs that a pair multiplies: of a number its position, of others all."""
        if self.kind in (NUMBER, DATE) and not self.bins:
            return self.outputs[:1]
        return self.outputs

    def facts(self) -> dict[str, Any]:
        """The column in the form of JSON and of `columns_of`."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        given["words"] = dict(self.words) if self.words else ()
        unset = {each.name: each.default for each in fields(self)}
        return {key: value for key, value in given.items() if value != unset[key] and key != "name"}


_RANGE = ("low", "high", "missing", "curves", "rises", "falls")
_KEYS = {
    NUMBER: (*_RANGE, "points", "bins", "factor"),
    DATE: (*_RANGE, "format"),
    CATEGORY: ("levels", "missing", "words"),
    TEXT: ("width",),
}


def _check_number(column: Column) -> None:
    low = column.low
    high = column.high
    name = column.name
    if low is None or high is None:
        raise ValueError(f"{name}: low and high are missing: write the public range")
    if not all(isinstance(end, int | float) and math.isfinite(end) for end in (low, high)):
        raise ValueError(f"{name}: low and high must be numbers")
    if not low < high:  # type: ignore[operator]
        raise ValueError(f"{name}: high must be above low (got {high} and {low})")
    if column.points and (column.points[0], column.points[-1]) != (low, high):
        raise ValueError(f"{name}: points must begin at low and end at high")
    if column.bins and not low < column.bins[0] <= column.bins[-1] < high:  # type: ignore[operator]
        raise ValueError(f"{name}: bins must lie between low and high")
    for key, values in (("points", column.points), ("bins", column.bins)):
        if any(before >= after for before, after in pairwise(values)):
            raise ValueError(f"{name}: {key} must rise")
    if not (math.isfinite(column.factor) and column.factor > 0):
        raise ValueError(f"{name}: factor must be a number above 0 (got {column.factor})")
    if column.bins and (column.points or column.curves):
        raise ValueError(f"{name}: bins can't be combined with points or curves")
    _check_curves(column)
    if isinstance(column.missing, str) and column.missing != MIDDLE:
        raise ValueError(f'{name}: missing must be "{MIDDLE}" or a number (got {column.missing!r})')


def _check_curves(column: Column) -> None:
    if not (isinstance(column.curves, int) and 0 <= column.curves <= MOST_CURVES):
        raise ValueError(f"{column.name}: curves must be a number up to {MOST_CURVES}, such as 3")
    if (column.rises, column.falls) not in ((False, False), (True, False), (False, True)):
        raise ValueError(f"{column.name}: rises or falls must be true or false, and not both true")


def _check_date(column: Column) -> None:
    if column.low is None or column.high is None:
        raise ValueError(
            f"{column.name}: low and high are missing: write the first and the last public day"
        )
    ends = [_iso_day(column, end) for end in (column.low, column.high)]
    if not ends[0] < ends[1]:
        raise ValueError(
            f"{column.name}: high must be after low (got {column.high} and {column.low})"
        )
    if column.missing not in (None, MIDDLE):
        _iso_day(column, column.missing)
    _check_curves(column)


def _iso_day(column: Column, day: object) -> float:
    try:
        return float(date.fromisoformat(str(day)).toordinal())
    except ValueError as error:
        raise ValueError(
            f"{column.name}: a public day must be written like 2022-01-31 (got {day})"
        ) from error


def _check_category(column: Column) -> None:
    if not column.levels or len({*column.levels}) < len(column.levels):
        raise ValueError(f"{column.name}: levels must be given, each once: write the public levels")
    for word, level in column.words:
        if level not in column.levels or word in column.levels:
            raise ValueError(f"{column.name}: words must map other words to levels (got {word})")
    if column.missing not in (None, CATEGORY, *column.levels):
        raise ValueError(
            f'{column.name}: missing must be "{CATEGORY}" or a level (got {column.missing!r})'
        )


def _check_text(column: Column) -> None:
    if column.width < 2:
        raise ValueError(
            f"{column.name}: width must be given, at least 2: the number of columns "
            "that words are hashed into"
        )


_CHECKS: dict[str, Callable[[Column], None]] = {
    NUMBER: _check_number,
    DATE: _check_date,
    CATEGORY: _check_category,
    TEXT: _check_text,
}


def columns_of(given: Mapping[str, Any]) -> tuple[Column, ...]:
    """Columns by their names, each a table of its attributes or a short form: `[18, 100]` is the
    range of a number, two dates are the range of a date, and words are the levels of a category.

    ValueError: its message names the column and the correct form.

    >>> [column.kind for column in columns_of({"age": [18, 100], "sex": ["F", "M"]})]
    ['number', 'category']
    """
    return tuple(_column_of(name, value) for name, value in given.items())


def _column_of(name: str, value: Any) -> Column:
    if isinstance(value, list | tuple):
        value = _long_form(name, list(value))
    if not isinstance(value, Mapping) or "kind" not in value:
        raise ValueError(f"{name}: write its kind, one of {', '.join(KINDS)}, or a short form")
    known = {each.name for each in fields(Column)} - {"name"}
    unknown = [key for key in value if key not in known]
    if unknown:
        raise ValueError(f"{name}: unknown key {unknown[0]}; there are {', '.join(sorted(known))}")
    facts: dict[str, Any] = {
        key: str(each) if isinstance(each, date) else each for key, each in value.items()
    }
    facts["levels"] = tuple(map(str, facts.get("levels", ())))
    words = facts.get("words", {})
    if not isinstance(words, Mapping):
        raise ValueError(f'{name}: words must be a table, such as {{ ja = "yes" }}')
    facts["words"] = tuple((str(word), str(level)) for word, level in words.items())
    for key in ("points", "bins"):
        facts[key] = tuple(map(float, facts.get(key, ())))
    return Column(name, **{key: each for key, each in facts.items() if key != "name"})


def _long_form(name: str, values: list[Any]) -> dict[str, Any]:
    if values and all(isinstance(value, str) for value in values):
        return {"kind": CATEGORY, "levels": values}
    if len(values) == 2:
        if isinstance(values[0], date):
            kind = DATE
        else:
            kind = NUMBER
        return {"kind": kind, "low": values[0], "high": values[1]}
    raise ValueError(f"{name}: a list is [low, high], two days, or the levels as words")


def column_names(columns: Iterable[Column], pairs: Iterable[Pair] = ()) -> list[str]:
    """The names of the numbers that a row is encoded as, in order."""
    known = {column.name: column for column in columns}
    names = [name for column in known.values() for name in column.outputs]
    for first, second in pairs:
        names += [
            f"{one} and {other}" for one in known[first].crossed for other in known[second].crossed
        ]
    return names


def encoded_columns(
    table: Mapping[str, Any],
    columns: Sequence[Column],
    pairs: Iterable[Pair] = (),
    *,
    decimal: str = ".",
) -> Array:
    """The rows of a table as float64 (n, len(column_names(columns, pairs))).

    A number or a date in low..high is mapped to -1..1, and values outside are clamped. A category
    becomes a one-hot vector. A text becomes a vector of hashed word counts with norm 1. A pair
    becomes the products of what its columns became.

    Args:
      table: the cells of each column by its name, as a pandas DataFrame or a dictionary of lists.
      pairs: the names of two columns each.
      decimal: the decimal mark in numbers that are text.

    Raises:
      CellError: a cell must not be empty, or is not a number or a date.
      KeyError: a column is missing.

    >>> columns = columns_of({"age": [0, 100], "sex": ["F", "M"]})
    >>> encoded_columns({"age": ["75", "200"], "sex": ["M", "?"]}, columns).tolist()
    [[0.5, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 1.0]]
    """
    parts = {
        column.name: _ENCODERS[column.kind](column, list(table[column.in_file]), decimal)
        for column in columns
    }
    widths = {column.name: len(column.crossed) for column in columns}
    crossed = []
    for first, second in pairs:
        one = parts[first][:, : widths[first], None]
        other = parts[second][:, None, : widths[second]]
        crossed.append((one * other).reshape(len(one), -1))
    return np.concatenate([*parts.values(), *crossed], axis=1)


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


def _quantities(column: Column, cells: list[Any], decimal: str) -> Array:
    """Numbers and dates: the position in the range and, if empty cells are allowed, a flag for
    them."""
    shares, empty = shares_of_range(column, cells, decimal)
    found = _places(column, np.clip(shares, 0, 1))
    if column.missing is not None:
        found.append(empty)
    return np.stack(found, axis=1)


def _places(column: Column, shares: Array) -> list[Array]:
    """The position in the range with its curves, or the group."""
    if column.bins:
        # The ends of the range are the same numbers as for a cell, so a cell at a cut is above it.
        groups = np.searchsorted(_shares(column, column.bins), shares, side="right")
        return [(groups == group).astype(float) for group in range(len(column.bins) + 1)]
    if column.points:
        steps = np.linspace(0, 1, len(column.points))
        shares = np.interp(shares, _shares(column, column.points), steps)
    # Slow curves count more: noise is the same on each, and bends of real quantities are slow.
    bends = [np.cos(np.pi * number * shares) / number for number in range(1, column.curves + 1)]
    return [shares * 2 - 1, *bends]


def _shares(column: Column, values: tuple[float, ...]) -> Array:
    low, high = (float(end or 0) for end in (column.low, column.high))
    return (np.array(values) - low) / (high - low)


def shares_of_range(column: Column, cells: list[Any], decimal: str) -> tuple[Array, Array]:
    """Numbers and dates (n,): 0 at low, 1 at high, and beyond for cells outside the range; and 1.0
    for each empty cell, else 0.0."""
    dates = column.kind == DATE
    low, high = (
        _iso_day(column, end) if dates else float(end or 0) for end in (column.low, column.high)
    )
    filled = (low + high) / 2
    if column.missing not in (None, MIDDLE):
        if dates:
            filled = _iso_day(column, column.missing)
        else:
            filled = float(column.missing or 0)
    values = np.zeros(len(cells))
    empty = np.zeros(len(cells))
    for row, cell in enumerate(cells):
        if is_empty(cell):
            _refuse_empty(column, row)
            values[row] = filled
            empty[row] = 1.0
        else:
            values[row] = _day(column, row, cell) if dates else _number(column, row, cell, decimal)
    return (values - low) / (high - low), empty


def _refuse_empty(column: Column, row: int) -> None:
    if column.missing is None:
        if column.kind == CATEGORY:
            choice = f'missing = "{CATEGORY}"'
        else:
            choice = f'missing = "{MIDDLE}", or a value'
        raise CellError(row, f"{column.name} is empty: write {choice} for it in data.toml")


def _number(column: Column, row: int, cell: Any, decimal: str) -> float:
    if isinstance(cell, str):
        text = cell.strip().replace(decimal, ".")
    else:
        text = cell
    try:
        value = float(text)
    except (TypeError, ValueError):
        value = math.nan
    if math.isfinite(value):
        return value * column.factor
    comma = isinstance(cell, str) and decimal == "." and re.fullmatch(r"[+-]?\d*,\d+", cell.strip())
    if comma:
        hint = ': write decimal = "," in data.toml'
    elif isinstance(cell, str) and THOUSANDS.fullmatch(cell.strip()):
        hint = ": write it without thousands separators"
    else:
        hint = "; words need a column with kind = category"
    raise CellError(row, f"{column.name} is not a number{hint}")


def _day(column: Column, row: int, cell: Any) -> float:
    """The ordinal of a day."""
    try:
        if isinstance(cell, date):  # a datetime is one, and so is a Timestamp of pandas
            return float(cell.toordinal())
        text = str(cell).strip()
        if column.format:
            read = datetime.strptime(text, column.format)
        else:
            read = datetime.fromisoformat(text)
        return float(read.toordinal())
    except ValueError:
        if column.format:
            known = f"in the format {column.format}"
        else:
            known = "such as 2022-01-31"
        problem = (
            f'{column.name} is not a date {known}: write its format, such as format = "%d.%m.%Y"'
        )
        raise CellError(row, problem) from None


def _one_hot(column: Column, cells: list[Any], decimal: str) -> Array:
    places = {level: place for place, level in enumerate(column.levels)}
    places |= {word: places[level] for word, level in column.words}
    another = len(column.levels)
    flags = {level.lower(): level for level in column.levels}
    found = np.zeros((len(cells), len(column.outputs)))
    for row, cell in enumerate(cells):
        word = _word(cell)
        if isinstance(cell, bool | np.bool_):  # pandas reads TRUE as True
            word = flags.get(word.lower(), word)
        if word not in places and is_empty(cell):
            _refuse_empty(column, row)
            found[row, places.get(str(column.missing), len(column.outputs) - 1)] = 1
        else:
            found[row, places.get(word, another)] = 1
    return found


def _word(cell: Any) -> str:
    """A level as text: 1.0 in a column of numbers is 1."""
    whole = isinstance(cell, float | np.floating) and float(cell).is_integer()
    if whole:
        return str(int(cell))
    return str(cell).strip()


def _hashed(column: Column, cells: list[Any], decimal: str) -> Array:
    """Counts of words by a public hash with signs, divided by their norm; all 0 for an empty
    text."""
    found = np.zeros((len(cells), column.width))
    for row, cell in enumerate(cells):
        for word in [] if is_empty(cell) else _WORD.findall(str(cell).lower()):
            number = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "big")
            found[row, (number >> 1) % column.width] += 1 if number % 2 else -1
    lengths = np.linalg.norm(found, axis=1, keepdims=True)
    return found / np.where(lengths == 0, 1, lengths)


_ENCODERS: dict[str, Callable[[Column, list[Any], str], Array]] = {
    NUMBER: _quantities,
    DATE: _quantities,
    CATEGORY: _one_hot,
    TEXT: _hashed,
}
