"""Hints about rows that may be copies, and about columns that may not be worth an input: constant,
different in every row, or too good to be true. They are read from the data, and are not private."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from discreet.data.columns import CATEGORY, TEXT
from discreet.data.description import DataDescription
from discreet.data.empty_cells import is_empty
from discreet.data.encoding import Reading
from discreet.privacy.repeated_rows import repeated_rows

MANY_ROWS = 20  # with fewer a hint is likely chance
SEPARATED = 0.995  # the share of rows whose class one column alone tells


def hints(
    description: DataDescription,
    table: Mapping[str, Sequence[Any]],
    readings: Mapping[str, Reading],
    place_of: Callable[[int], str],
) -> Iterator[str]:
    """A sentence on each column of which there is one, and on copies. `table`: the cells by column
    of the file. `readings`: as `readings_of` has them. `place_of`: the words for a row."""
    classes = _classes(description, table)
    for column in description.columns:
        cells = table[column.in_file]
        known = {str(cell).strip() for cell in cells if not is_empty(cell)}
        if len(known) < 2:
            yield f"{column.name} says the same in every row: it tells a model nothing"
        elif column.kind in (CATEGORY, TEXT) and len(known) == len(cells) >= MANY_ROWS:
            yield f"{column.name} is different in every row, like an identifier"
        elif classes is None or column.name not in readings:
            continue
        elif _separates(readings[column.name].values, classes):
            yield (
                f"{column.name} alone separates {description.target}, which is too good to be "
                "true: is it written after the outcome is known?"
            )
    yield from _copies(description, table, place_of)


def _copies(
    description: DataDescription,
    table: Mapping[str, Sequence[Any]],
    place_of: Callable[[int], str],
) -> Iterator[str]:
    """A sentence on rows of a table without owners that may be copies."""
    if description.owner is not None:
        return
    names = [*(column.in_file for column in description.columns), str(description.target)]
    columns = [[str(cell).strip() for cell in table[name]] for name in names if name in table]
    # Each half has columns that tell people apart.
    columns.sort(key=lambda cells: len(set(cells)), reverse=True)
    rows = list(zip(*columns, strict=True))
    found = repeated_rows([row[::2] for row in rows], [row[1::2] for row in rows])
    if found is None:
        return
    earlier, later, copies = found
    yield (
        f"{place_of(earlier)} and {place_of(later)} are equal, and {copies} rows in all repeat an "
        "earlier one. If they are copies (an export that was appended twice, oversampling), a "
        "person counts several times: take them out, or name the owner"
    )


def _classes(
    description: DataDescription, table: Mapping[str, Sequence[Any]]
) -> np.ndarray[Any, Any] | None:
    """The class of each row as a number; None without classes, or with few rows."""
    cells = table.get(str(description.target), ())
    if len(cells) < MANY_ROWS or description.target_low is not None:
        return None
    return np.unique([str(cell).strip() for cell in cells], return_inverse=True)[1]


def _separates(values: np.ndarray[Any, Any], classes: np.ndarray[Any, Any]) -> bool:
    """True if equal values, or for two classes one cut, tell nearly every row's class, and no class
    is so frequent that it needs no column."""
    rows = len(classes)
    if Counter(classes.tolist()).most_common(1)[0][1] >= SEPARATED * rows:
        return False
    by_value = Counter(zip(values.tolist(), classes.tolist(), strict=True))
    most = Counter[float]()
    for (value, _), count in by_value.items():
        most[value] = max(most[value], count)
    if len(most) <= rows / 10 and sum(most.values()) >= SEPARATED * rows:
        return True
    if classes.max() != 1:
        return False
    order = np.argsort(values, kind="stable")
    last = np.append(np.diff(values[order]) > 0, True)
    of_one = np.cumsum(classes[order])[last]
    others = np.cumsum(1 - classes[order])[last]
    right = np.maximum(others + of_one[-1] - of_one, of_one + others[-1] - others)
    return bool(right.max() >= SEPARATED * rows)
