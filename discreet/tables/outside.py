"""Cells outside the public range of their column, which a run counts as the range's nearer end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import numpy as np

from discreet.data.encoding import DATE, NUMBER, Column, encoded_columns

THIRD = 1 / 3 + 1e-9


@dataclass(frozen=True)
class Outside:
    """A column with cells outside its range, and their number."""

    name: str
    count: int


def cells_outside(
    table: Mapping[str, Sequence[Any]], columns: Sequence[Column], *, decimal: str
) -> Iterator[Outside]:
    """The columns of numbers and dates with cells outside low..high.

    >>> columns = (Column("age", "number", 0, 110),)
    >>> list(cells_outside({"age": ["-9", "110", "0"]}, columns, decimal="."))
    [Outside(name='age', count=1)]
    """
    for column in columns:
        if column.kind in (NUMBER, DATE):
            places = encoded_columns(table, (_tripled(column),), decimal=decimal)[:, 0]
            count = int((np.abs(places) > THIRD).sum())
            if count:
                yield Outside(column.name, count)


def _tripled(column: Column) -> Column:
    """The column with a range three times as wide, whose middle third is the public range."""
    low: Any = column.low
    high: Any = column.high
    if column.kind == NUMBER:
        return replace(column, low=2 * low - high, high=2 * high - low)
    first = date.fromisoformat(str(low))
    last = date.fromisoformat(str(high))
    return replace(column, low=str(first - (last - first)), high=str(last + (last - first)))
