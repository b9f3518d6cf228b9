"""Which cells are empty, in a table and in a list of owners."""

from __future__ import annotations

# The texts that count as an empty cell, unless a column lists them as levels.
EMPTY = frozenset(("", "na", "n/a", "nan", "null", "#n/a"))


def is_empty(cell: object) -> bool:
    """True for an empty cell.

    >>> [is_empty(cell) for cell in (None, float("nan"), " NA ", "none", 0)]
    [True, True, True, False, False]
    """
    if isinstance(cell, str):
        return cell.strip().lower() in EMPTY
    if cell is None or type(cell).__name__ == "NAType":  # pandas' NA, which has no truth value
        return True
    return cell != cell
