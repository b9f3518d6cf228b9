"""Tables as text, which a spreadsheet opens without computing anything."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable

# what a spreadsheet computes, and no number
FORMULA = re.compile(r"[=@\t\r]|[+-](?!\.?\d[\d.]*(e[+-]?\d+)?$|inf$)")


def csv_text(rows: Iterable[Iterable[object]], *, end: str = "\n") -> str:
    """A line for each row, in which a spreadsheet finds no formula: a text that is no number and
    begins as a formula gets an apostrophe before it.

    >>> csv_text([["=1+1", "-0.5", -1]])
    "'=1+1,-0.5,-1\\n"
    """
    text = io.StringIO(newline="")
    plain = (
        [f"'{cell}" if isinstance(cell, str) and FORMULA.match(cell) else cell for cell in row]
        for row in rows
    )
    csv.writer(text, lineterminator=end).writerows(plain)
    return text.getvalue()
