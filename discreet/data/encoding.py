"""The cells of a table as numbers, encoded with public facts about each column only.

`discreet export` copies this file, cell_reading.py and columns.py beside a model, so that users of
the model encode rows as the run did. It imports nothing else from Discreet.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.polynomial.chebyshev import chebvander

from discreet.data.cell_reading import CellError, Marks, day_in, number_in, word_in
from discreet.data.columns import (
    CATEGORY,
    DATE,
    MIDDLE,
    NUMBER,
    TEXT,
    Column,
    Pair,
    chapter_of,
    iso_day,
)
from discreet.data.empty_cells import is_empty

Array = np.ndarray[Any, Any]

BELOW = ("<", "\u2264")
_WORD = re.compile(r"\w+")


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
    thousands: str = "",
) -> Array:
    """The rows of a table as float64 (n, len(column_names(columns, pairs))).

    A number or a date in low..high is mapped to -1..1, and values outside are clamped. A category
    becomes a one-hot vector. A text becomes a vector of hashed word counts with norm 1. A pair
    becomes the products of what its columns became.

    Args:
      table: the cells of each column by its name, as a pandas DataFrame or a dictionary of lists.
      pairs: the names of two columns each.
      decimal, thousands: the marks in numbers that are text.

    Raises:
      CellError: a cell must not be empty, or is not a number or a date.
      KeyError: a column is missing.

    >>> from discreet.data.columns import columns_of
    >>> columns = columns_of({"age": [0, 100], "sex": ["F", "M"]})
    >>> encoded_columns({"age": ["75", "200"], "sex": ["M", "?"]}, columns).tolist()
    [[0.5, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 1.0]]
    """
    marks = Marks(decimal, thousands)
    parts = {
        column.name: _encoded(column, list(table[column.in_file]), marks) for column in columns
    }
    widths = {column.name: len(column.crossed) for column in columns}
    crossed = []
    for first, second in pairs:
        one = parts[first][:, : widths[first], None]
        other = parts[second][:, None, : widths[second]]
        crossed.append((one * other).reshape(len(one), widths[first] * widths[second]))
    return np.concatenate([*parts.values(), *crossed], axis=1)


@dataclass(frozen=True, eq=False, repr=False)  # so that its text has no cell
class Reading:
    """The cells of a column as they were read.

    Attributes:
      values: (n,) numbers in the model's unit, days, or places of levels; the number of levels for
        a word of no level, and one more for an empty cell that counts as a category of its own.
      empty, below: (n,) true for an empty cell, and for a number below a limit.
      wrong: the cells that can't be read: the row, from 0, and the problem.
    """

    values: Array
    empty: Array
    below: Array
    wrong: tuple[tuple[int, str], ...]


_Cell = tuple[float, bool, bool]  # a value, and whether the cell is empty or below a limit


def read_cells(column: Column, cells: Sequence[Any], marks: Marks) -> Reading:
    """Reads the cells of a number, a date or a category. Equal texts are read once."""
    read = partial(_READERS[column.kind], column, marks=marks)
    known = dict[str, int]()
    found = list[_Cell]()
    places = list[int]()
    wrong = list[tuple[int, str]]()
    for row, cell in enumerate(cells):
        place = known.get(cell) if isinstance(cell, str) else None
        if place is None:
            place = len(found)
            try:
                found.append(read(cell))
            except ValueError as error:
                found.append((0.0, False, False))
                wrong.append((row, str(error)))
            else:
                if isinstance(cell, str):
                    known[cell] = place
        places.append(place)
    table = np.array(found, np.float64).reshape(-1, 3)[np.array(places, np.int64)]
    return Reading(table[:, 0], table[:, 1] > 0, table[:, 2] > 0, tuple(wrong))


def _is_blank(column: Column, cell: Any) -> bool:
    if column.empty and isinstance(cell, str):
        text = cell.strip().casefold()
        if any(text == word.strip().casefold() for word in column.empty):
            return True
    return is_empty(cell)


def _check_missing(column: Column) -> None:
    """Raises ValueError if an empty cell is refused."""
    if column.missing is None:
        if column.kind == CATEGORY:
            choice = f'missing = "{CATEGORY}"'
        else:
            choice = f'missing = "{MIDDLE}", or a value'
        raise ValueError(f"is empty: write {choice} for it in data.toml")


def range_of(column: Column) -> tuple[float, float]:
    """The public range of a number, or of a date in ordinals of days."""
    if column.kind == DATE:
        return iso_day(column, column.low), iso_day(column, column.high)
    return float(column.low or 0), float(column.high or 0)


def _filled(column: Column) -> float:
    """The value of an empty cell. ValueError: it is refused."""
    _check_missing(column)
    low, high = range_of(column)
    if column.missing == MIDDLE:
        return (low + high) / 2
    if column.kind == DATE:
        return iso_day(column, column.missing)
    return float(column.missing or 0)


def _read_number(column: Column, cell: Any, *, marks: Marks) -> _Cell:
    if _is_blank(column, cell):
        return _filled(column), True, False
    unit = column.unit or ""
    if not (isinstance(cell, str) and cell.lstrip().startswith(BELOW)):
        return number_in(cell, marks, unit) * column.factor, False, False
    if column.below is None:
        raise ValueError('is below a limit, as "<0.5" is: write below = "half" in data.toml')
    limit = number_in(cell.lstrip()[1:], marks, unit)
    return limit / 2 * column.factor, False, True


def _read_date(column: Column, cell: Any, *, marks: Marks) -> _Cell:
    if _is_blank(column, cell):
        return _filled(column), True, False
    return day_in(cell, column.format), False, False


def _read_word(column: Column, cell: Any, *, marks: Marks) -> _Cell:
    word = word_in(cell)
    if isinstance(cell, bool | np.bool_):  # pandas reads TRUE as True
        word = {level.lower(): level for level in column.levels}.get(word.lower(), word)
    word = dict(column.words).get(word, word)
    is_blank = word not in column.levels and _is_blank(column, cell)
    if is_blank:
        _check_missing(column)
        word = str(column.missing)
        if word == CATEGORY:
            return len(column.levels) + 1.0, True, False
    elif column.fold is not None:
        word = chapter_of(word)
    if word in column.levels:
        return float(column.levels.index(word)), is_blank, False
    return float(len(column.levels)), is_blank, False


_READERS: dict[str, Callable[..., _Cell]] = {
    NUMBER: _read_number,
    DATE: _read_date,
    CATEGORY: _read_word,
}


def _encoded(column: Column, cells: list[Any], marks: Marks) -> Array:
    if column.kind == TEXT:
        return _hashed(column, cells)
    reading = read_cells(column, cells, marks)
    if reading.wrong:
        row, problem = reading.wrong[0]
        raise CellError(row, f"{column.name} {problem}")
    if column.kind == CATEGORY:
        ones = np.zeros((len(cells), len(column.outputs)))
        ones[np.arange(len(cells)), reading.values.astype(np.int64)] = 1
        return ones
    low, high = range_of(column)
    shares = (np.clip(reading.values, low, high) - low) / (high - low)
    found = _places(column, shares)
    if column.below is not None:
        found.append(reading.below.astype(float))
    if column.missing is not None:
        found.append(reading.empty.astype(float))
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
    positions = shares * 2 - 1
    # Chebyshev polynomials are steep at the ends of a range, where many real quantities lie. Slow
    # ones count more: noise is the same on each, and bends of real quantities are slow.
    bends = chebvander(positions, column.curves + 1).T
    return [positions, *(bends[degree] / degree for degree in column.degrees)]


def _shares(column: Column, values: tuple[float, ...]) -> Array:
    low, high = range_of(column)
    return (np.array(values) - low) / (high - low)


def _hashed(column: Column, cells: list[Any]) -> Array:
    """Counts of words by a public hash with signs, divided by their norm; all 0 for an empty
    text."""
    found = np.zeros((len(cells), column.width))
    for row, cell in enumerate(cells):
        for word in [] if _is_blank(column, cell) else _WORD.findall(str(cell).lower()):
            number = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "big")
            found[row, (number >> 1) % column.width] += 1 if number % 2 else -1
    lengths = np.linalg.norm(found, axis=1, keepdims=True)
    return found / np.where(lengths == 0, 1, lengths)
