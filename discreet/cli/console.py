"""Tables on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

WIDE = 240  # columns of a table that goes into a file or a pipe


def print_table(rows: Sequence[dict[str, object]] | Sequence[dict[str, str]]) -> None:
    """A row for each of `rows`, a column for each name that any of them has; nothing without columns."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*columns)
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in columns))
    if columns:
        (Console() if sys.stdout.isatty() else Console(width=WIDE)).print(table)


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
