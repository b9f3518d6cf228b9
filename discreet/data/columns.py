"""The public facts about the columns of a table, as `data.toml` and `model.json` give them.

This file imports nothing from Discreet: `discreet export` copies it beside a model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import date
from difflib import get_close_matches
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
LOCAL = ("named", "words", "factor", "format", "empty", "unit")
HALF = "half"
ICD = "icd10"
# The chapters of ICD-10, wide enough for its clinical modification.
CHAPTERS = (
    *("A00-B99", "C00-D49", "D50-D89", "E00-E90", "F00-F99", "G00-G99", "H00-H59", "H60-H95"),
    *("I00-I99", "J00-J99", "K00-K95", "L00-L99", "M00-M99", "N00-N99", "O00-O99", "P00-P96"),
    *("Q00-Q99", "R00-R99", "S00-T98", "U00-U99", "V00-Y99", "Z00-Z99"),
)
MOST_WIDTH = 65_536
LARGEST = 1e30  # of a public number
LEAST_RANGE = 1e-9  # of a number, to the larger of its ends: in a shorter one all cells are alike
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
      fold: "icd10": a code that is no level counts as its chapter, such as A00-B99; without levels
        these are all chapters.
      below: "half": a number may be below a limit, as "<0.5", and counts as half of it; an
        additional column marks such cells. None: they are refused.
      width: the number of columns into which the words of a text are hashed.
      curves: the number of smooth curves of a number or a date, by which a linear model bends:
        Chebyshev polynomials of the position in the range, from degree 2.
      points: public values of a number, rising from low to high, that are mapped to equal steps
        from -1 to 1, such as quantiles from the literature.
      bins: public values within low..high that cut a number into groups; in place of its position.
      rises, falls: what a linear model predicts never falls, or never rises, along the column.

    The model knows nothing of the others, which say how this site writes the column:
      named: its name in the file.
      words: the level that a word of the file stands for.
      factor: the number by which a cell is multiplied, for another unit.
      format: the formats of a date for Python's strptime, one or several; none: 2022-01-31, with
        or without a time.
      empty: more texts that count as an empty cell, in any case.
      unit: a text that is cut off the end of a number.
    """

    name: str
    kind: str
    low: float | str | None = None
    high: float | str | None = None
    missing: float | str | None = None
    levels: tuple[str, ...] = ()
    fold: str | None = None
    below: str | None = None
    width: int = 0
    curves: int = 0
    points: tuple[float, ...] = ()
    bins: tuple[float, ...] = ()
    rises: bool = False
    falls: bool = False
    named: str | None = None
    words: tuple[tuple[str, str], ...] = ()
    factor: float = 1.0
    format: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()
    unit: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"{self.name}: kind must be one of {', '.join(KINDS)} (got {self.kind})"
            )
        allowed = {"name", "kind", "named", "empty", *_KEYS[self.kind]}
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
        flags = []
        if self.below is not None:
            flags.append(f"{self.name} is below")
        if self.missing is not None:
            flags.append(f"{self.name} is empty")
        return (*self._positions(), *flags)

    @property
    def degrees(self) -> range:
        """The degrees of the curves: the position itself is of degree 1."""
        return range(2, self.curves + 2)

    def _positions(self) -> tuple[str, ...]:
        """The names of the numbers that say where in its range a cell is."""
        if not self.bins:
            bends = (f"{self.name} curve {degree}" for degree in self.degrees)
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
        if len(self.format) == 1:
            given["format"] = self.format[0]
        unset = {each.name: each.default for each in fields(self)}
        return {key: value for key, value in given.items() if value != unset[key] and key != "name"}


_RANGE = ("low", "high", "missing", "curves", "rises", "falls")
_KEYS = {
    NUMBER: (*_RANGE, "points", "bins", "factor", "below", "unit"),
    DATE: (*_RANGE, "format"),
    CATEGORY: ("levels", "missing", "words", "fold"),
    TEXT: ("width",),
}


def _check_number(column: Column) -> None:
    low = column.low
    high = column.high
    name = column.name
    if low is None or high is None:
        raise ValueError(f"{name}: low and high are missing: write the public range")
    if not (_is_number(low) and _is_number(high)):
        raise ValueError(f"{name}: low and high must be numbers within [-{LARGEST:g}, {LARGEST:g}]")
    size = max(abs(low), abs(high))  # type: ignore[arg-type]
    if not high - low >= max(LEAST_RANGE * size, 1 / LARGEST):  # type: ignore[operator]
        raise ValueError(
            f"{name}: high must be above low, by a billionth at least (got {high} and {low})"
        )
    if column.points and (column.points[0], column.points[-1]) != (low, high):
        raise ValueError(f"{name}: points must begin at low and end at high")
    if column.bins and not low < column.bins[0] <= column.bins[-1] < high:  # type: ignore[operator]
        raise ValueError(f"{name}: bins must lie between low and high")
    for key, values in (("points", column.points), ("bins", column.bins)):
        if any(before >= after for before, after in pairwise(values)):
            raise ValueError(f"{name}: {key} must rise")
    if not 0 < column.factor <= LARGEST:
        raise ValueError(f"{name}: factor must be within (0, {LARGEST:g}] (got {column.factor})")
    if column.bins and (column.points or column.curves):
        raise ValueError(f"{name}: bins can't be combined with points or curves")
    if column.below not in (None, HALF):
        raise ValueError(f'{name}: below must be "{HALF}" (got {column.below!r})')
    _check_curves(column)
    if isinstance(column.missing, str) and column.missing != MIDDLE:
        raise ValueError(f'{name}: missing must be "{MIDDLE}" or a number (got {column.missing!r})')


def _check_curves(column: Column) -> None:
    if not 0 <= column.curves <= MOST_CURVES:
        raise ValueError(f"{column.name}: curves must be a number up to {MOST_CURVES}, such as 3")
    if column.rises and column.falls:
        raise ValueError(f"{column.name}: rises or falls may be true, but not both true")


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
    if column.fold not in (None, ICD):
        raise ValueError(f'{column.name}: fold must be "{ICD}" (got {column.fold!r})')
    if column.fold is not None and not {*column.levels} <= {*CHAPTERS}:
        raise ValueError(f"{column.name}: levels of a fold are chapters, such as {CHAPTERS[0]}")
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
    if not 2 <= column.width <= MOST_WIDTH:
        raise ValueError(
            f"{column.name}: width must be given, within [2, {MOST_WIDTH}]: the number of columns "
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
        meant = "".join(f"; did you mean {key}?" for key in get_close_matches(unknown[0], known, 1))
        there = f"there are {', '.join(sorted(known))}"
        raise ValueError(f"{name}: unknown key {unknown[0]}{meant or ';'} {there}")
    facts = {key: _value_of(name, key, each) for key, each in value.items() if key != "name"}
    if facts.get("fold") is not None:
        facts.setdefault("levels", CHAPTERS)
    return Column(name, **facts)


def _value_of(name: str, key: str, value: Any) -> Any:
    """A value as `Column` has it. ValueError: it is of another kind."""
    if isinstance(value, date):
        value = str(value)
    if key == "format" and isinstance(value, str):
        value = [value]
    fits, words = _FORMS[key]
    if not fits(value):
        raise ValueError(f"{name}: {key} must be {words}")
    if key == "words":
        return tuple((str(word), str(level)) for word, level in value.items())
    if key in ("points", "bins"):
        return tuple(map(float, value))
    if isinstance(value, list | tuple):
        return tuple(map(str, value))
    return value


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= LARGEST


def _is_word(value: object) -> bool:
    """True for a text, or a number or a truth value that TOML has without quotes."""
    return isinstance(value, str | int | float)


def _each(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(fits, value))


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping) and all(map(_is_word, value.values()))


_Form = tuple[Callable[[Any], bool], str]
_TEXT: _Form = (lambda value: isinstance(value, str), "a text")
_COUNT: _Form = (lambda value: type(value) is int and abs(value) < 2**31, "a whole number")
_FLAG: _Form = (lambda value: isinstance(value, bool), "true or false")
_END: _Form = (
    lambda value: isinstance(value, str) or _is_number(value),
    f"a number within [-{LARGEST:g}, {LARGEST:g}], or a day",
)
_WORDS: _Form = (_each(_is_word), 'a list of texts, such as ["F", "M"]')
_NUMBERS: _Form = (_each(_is_number), f"a list of numbers within [-{LARGEST:g}, {LARGEST:g}]")
_FORMS: dict[str, _Form] = {
    **dict.fromkeys(("kind", "named", "below", "unit", "fold"), _TEXT),
    **dict.fromkeys(("width", "curves"), _COUNT),
    **dict.fromkeys(("rises", "falls"), _FLAG),
    **dict.fromkeys(("low", "high", "missing"), _END),
    **dict.fromkeys(("levels", "empty"), _WORDS),
    **dict.fromkeys(("points", "bins"), _NUMBERS),
    "factor": (_is_number, "a number above 0"),
    "format": (_each(lambda value: isinstance(value, str)), "a text, or a list of texts"),
    "words": (_is_table, 'a table, such as { ja = "yes" }'),
}


def chapter_of(code: str) -> str:
    """The chapter of an ICD-10 code; any other text as it is.

    >>> chapter_of("i21.4"), chapter_of("D50"), chapter_of("none")
    ('I00-I99', 'D50-D89', 'none')
    """
    start = code[:3].upper()
    if re.fullmatch(r"[A-Z]\d\d", start, re.ASCII):
        for chapter in CHAPTERS:
            first, last = chapter.split("-")
            if first <= start <= last:
                return chapter
    return code


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
