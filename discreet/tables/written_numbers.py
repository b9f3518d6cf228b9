"""How the numbers of a table are written: marks, units, limits, and words for empty cells."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from discreet.data.cell_reading import MINUS, Marks, number_in
from discreet.data.encoding import BELOW

COMMA = re.compile(r"[+-]?\d+,\d+")
POINT = re.compile(r"[+-]?\d+\.\d+")
# Numbers with a separator before each three digits, which a decimal mark may also stand before.
COMMA_GROUPS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d+)?")
POINT_GROUPS = re.compile(r"[+-]?[1-9]\d{0,2}(\.\d{3})+(,\d+)?")
SPACE_GROUPS = re.compile(r"[+-]?[1-9]\d{0,2}([ \u00a0\u2009\u202f])\d{3}(\1\d{3})*([.,]\d+)?")
SIGNS = ("-", "+", MINUS)
UNIT = re.compile(r"[<\u2264]?[\s\d.,'+-]*\d\s*([^\s\d.,][^\d]*)")
# Words that stand for an empty cell in many tables, beside those that always do.
WORDS = frozenset(
    (
        *("-", "--", "?", ".", "k.a.", "k. a.", "keine angabe", "n.a.", "n. a.", "n.b.", "nb"),
        *("none", "unknown", "unbekannt", "missing", "fehlt", "nicht bestimmt", "inconnu"),
        # errors of Excel, in English and German
        *("#value!", "#div/0!", "#ref!", "#name?", "#num!", "#null!"),
        *("#wert!", "#nv", "#bezug!", "#zahl!"),
    )
)


@dataclass(frozen=True)
class WrittenNumbers:
    """The numbers of a column, and the keys of data.toml by which they are read."""

    numbers: list[float]
    keys: str
    some_empty: bool


@dataclass(frozen=True)
class WrittenMarks:
    """The signs in the numbers of a table: decimal commas, decimal points, and signs before each
    three digits."""

    commas: bool
    points: bool
    thousands: frozenset[str]

    @property
    def both(self) -> bool:
        """True if some numbers have decimal commas, and others decimal points."""
        return self.commas and self.points

    def chosen(self) -> Marks:
        """The decimal mark and thousands separator of the table. A point before three digits
        separates thousands in a table with decimal commas, and the other way round."""
        decimal = "," if self.commas and not self.points else "."
        groups = self.thousands - {decimal}
        if not self.commas and not self.points:
            groups -= {","}
        if self.both or len(groups) > 1:
            groups -= {",", "."}
        if len(groups) == 1:
            return Marks(decimal, *groups)
        return Marks(decimal)


def marks_in(columns: Mapping[str, Sequence[Any]]) -> WrittenMarks:
    """The marks in the cells of a table."""
    cells = {
        cell.strip().replace(MINUS, "-")
        for column in columns.values()
        for cell in column
        if isinstance(cell, str)
    }
    comma_groups = {cell for cell in cells if COMMA_GROUPS.fullmatch(cell)}
    point_groups = {cell for cell in cells if POINT_GROUPS.fullmatch(cell)}
    spaced = {cell: found[1] for cell in cells if (found := SPACE_GROUPS.fullmatch(cell))}
    commas = {cell for cell in cells - comma_groups if COMMA.fullmatch(cell)}
    points = {cell for cell in cells - point_groups if POINT.fullmatch(cell)}
    commas |= {cell for cell in (*point_groups, *spaced) if "," in cell}
    points |= {cell for cell in (*comma_groups, *spaced) if "." in cell}
    groups = {",": comma_groups, ".": point_groups}
    signs = {sign for sign, some in groups.items() if some} | {*spaced.values()}
    return WrittenMarks(bool(commas), bool(points), frozenset(signs))


def written_numbers(cells: Sequence[str], marks: Marks) -> WrittenNumbers | None:
    """The numbers in cells that are not empty, if all of them are numbers but for a unit, limits
    and words for empty cells; None otherwise."""
    words = sorted({cell for cell in cells if cell.casefold() in WORDS})
    full = [cell for cell in cells if cell not in words]
    units = [found[1].strip() for cell in full if (found := UNIT.fullmatch(cell))]
    unit = next(iter(units), "")
    is_slip = 0 < len(units) < len(full) / 2  # 2o among numbers is no unit
    # 41- is a number below 0, and 0.4 beside 40% may be either.
    is_doubtful = unit in SIGNS or (unit == "%" and len(units) < len(full))
    if len({*units}) > 1 or is_slip or is_doubtful or not full:
        return None
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
