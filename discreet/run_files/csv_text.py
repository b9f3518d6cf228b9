"""The text of cells, and CSV text that a spreadsheet opens without evaluating formulas."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable

# the start of a formula, except in a number
FORMULA = re.compile(r"[=@\t\r]|[+-](?!\.?\d[\d.]*(e[+-]?\d+)?$|inf$)")


def csv_text(rows: Iterable[Iterable[object]], *, end: str = "\n") -> str:
    """One line per row, without formulas for a spreadsheet: a text that begins like a formula and
    is not a number gets an apostrophe before it.

    >>> csv_text([["=1+1", "-0.5", -1]])
    "'=1+1,-0.5,-1\\n"
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator=end)
    for row in rows:
        cells = list(row)
        for place, cell in enumerate(cells):
            if isinstance(cell, str) and FORMULA.match(cell):
                cells[place] = f"'{cell}"
        writer.writerow(cells)
    return text.getvalue()


def cell_text(value: object, *, digits: int) -> str:
    """A value as the text of a table's cell: a float with that many digits, None empty."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    return str(value)
