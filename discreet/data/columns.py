"""The public facts about the columns of a table, as `data.toml` and `model.json` give them.

This file imports nothing from Discreet: `discreet export` copies it beside a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import date
from itertools import pairwise
from typing import Any

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
    ends = [iso_day(column, end) for end in (column.low, column.high)]
    if not ends[0] < ends[1]:
        raise ValueError(
            f"{column.name}: high must be after low (got {column.high} and {column.low})"
        )
    if column.missing not in (None, MIDDLE):
        iso_day(column, column.missing)
    _check_curves(column)


def iso_day(column: Column, day: object) -> float:
    """The ordinal of a public day. ValueError: it is not written like 2022-01-31."""
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
