"""The cells of a table as numbers, encoded with public facts about each column only.

`discreet export` copies this file, cell_reading.py and columns.py beside a model, so that users of
the model encode rows as the run did. It imports nothing else from Discreet.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from discreet.data.cell_reading import CellError, day_in, is_empty, number_in, word_in
from discreet.data.columns import CATEGORY, DATE, MIDDLE, NUMBER, TEXT, Column, Pair, iso_day

Array = np.ndarray[Any, Any]

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
        iso_day(column, end) if dates else float(end or 0) for end in (column.low, column.high)
    )
    filled = (low + high) / 2
    if column.missing not in (None, MIDDLE):
        if dates:
            filled = iso_day(column, column.missing)
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
            values[row] = _quantity(column, row, cell, decimal)
    return (values - low) / (high - low), empty


def _quantity(column: Column, row: int, cell: Any, decimal: str) -> float:
    """A cell as a number, or as the ordinal of its day."""
    try:
        if column.kind == DATE:
            return day_in(cell, column.format)
        return number_in(cell, decimal) * column.factor
    except ValueError as error:
        raise CellError(row, f"{column.name} {error}") from None


def _refuse_empty(column: Column, row: int) -> None:
    if column.missing is None:
        if column.kind == CATEGORY:
            choice = f'missing = "{CATEGORY}"'
        else:
            choice = f'missing = "{MIDDLE}", or a value'
        raise CellError(row, f"{column.name} is empty: write {choice} for it in data.toml")


def _one_hot(column: Column, cells: list[Any], decimal: str) -> Array:
    places = {level: place for place, level in enumerate(column.levels)}
    places |= {word: places[level] for word, level in column.words}
    another = len(column.levels)
    flags = {level.lower(): level for level in column.levels}
    found = np.zeros((len(cells), len(column.outputs)))
    for row, cell in enumerate(cells):
        word = word_in(cell)
        if isinstance(cell, bool | np.bool_):  # pandas reads TRUE as True
            word = flags.get(word.lower(), word)
        if word not in places and is_empty(cell):
            _refuse_empty(column, row)
            found[row, places.get(str(column.missing), len(column.outputs) - 1)] = 1
        else:
            found[row, places.get(word, another)] = 1
    return found


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
