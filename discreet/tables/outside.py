"""Cells outside the public range of their column, which a run counts as the range's nearer end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from discreet.data.encoding import DATE, NUMBER, Column, shares_of_range


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
            shares, _ = shares_of_range(column, list(table[column.name]), decimal)
            count = int(((shares < 0) | (shares > 1)).sum())
            if count:
                yield Outside(column.name, count)
