"""How the numbers of a table are written: marks, units, limits, and words for empty cells."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from discreet.data.cell_reading import Marks, number_in
from discreet.data.encoding import BELOW

COMMA = re.compile(r"[+-]?\d+,\d+")
POINT = re.compile(r"[+-]?\d+\.\d+")
# Numbers with a separator before each three digits, which a decimal mark may also stand before.
COMMA_GROUPS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d+)?")
POINT_GROUPS = re.compile(r"[+-]?[1-9]\d{0,2}(\.\d{3})+(,\d+)?")
UNIT = re.compile(r"[<\u2264]?[\s\d.,'+-]*\d\s*([^\s\d.,][^\d]*)")
# Words that stand for an empty cell in many tables, beside those that always do.
WORDS = frozenset(
    (
        *("-", "--", "?", ".", "k.a.", "k. a.", "keine angabe", "n.a.", "n. a.", "n.b.", "nb"),
        *("none", "unknown", "unbekannt", "missing", "fehlt", "nicht bestimmt", "inconnu"),
    )
)


@dataclass(frozen=True)
class WrittenNumbers:
    """The numbers of a column, and the keys of data.toml by which they are read."""

    numbers: list[float]
    keys: str
    some_empty: bool


def marks_in(columns: Mapping[str, Sequence[Any]]) -> Marks:
    """The decimal mark and thousands separator that explain the most cells. A point before three
    digits separates thousands in a table with decimal commas, and the other way round."""
    cells = {
        cell.strip() for column in columns.values() for cell in column if isinstance(cell, str)
    }
    comma_groups = {cell for cell in cells if COMMA_GROUPS.fullmatch(cell)}
    point_groups = {cell for cell in cells if POINT_GROUPS.fullmatch(cell)}
    commas = any(COMMA.fullmatch(cell) for cell in cells - comma_groups)
    points = any(POINT.fullmatch(cell) for cell in cells - point_groups)
    commas = commas or any("," in cell for cell in point_groups)
    points = points or any("." in cell for cell in comma_groups)
    if commas and not points:
        return Marks(",", "." if point_groups else "")
    if points and not commas:
        return Marks(".", "," if comma_groups else "")
    return Marks()


def written_numbers(cells: Sequence[str], marks: Marks) -> WrittenNumbers | None:
    """The numbers in cells that are not empty, if all of them are numbers but for a unit, limits
    and words for empty cells; None otherwise."""
    words = sorted({cell for cell in cells if cell.casefold() in WORDS})
    full = [cell for cell in cells if cell not in words]
    units = [found[1].strip() for cell in full if (found := UNIT.fullmatch(cell))]
    is_slip = 0 < len(units) < len(full) / 2  # 2o among numbers is no unit
    if len({*units}) > 1 or is_slip or not full:
        return None
    unit = next(iter(units), "")
    is_below = any(cell.startswith(BELOW) for cell in full)
    try:
        numbers = [number_in(cell.lstrip("".join(BELOW)), marks, unit) for cell in full]
    except ValueError:
        return None
    keys = ""
    if words:
        keys += f", empty = {json.dumps(words, ensure_ascii=False)}"
    if is_below:
        keys += ', below = "half"'
    if unit:
        keys += f", unit = {json.dumps(unit, ensure_ascii=False)}"
    return WrittenNumbers(numbers, keys, bool(words))


def is_doubtful(cells: Iterable[str], marks: Marks) -> bool:
    """True if all cells with a comma have it before three digits, and nothing says whether it
    separates thousands."""
    if "," in (marks.decimal, marks.thousands):
        return False
    return any(COMMA_GROUPS.fullmatch(cell) for cell in cells)
