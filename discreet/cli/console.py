"""Shared parts of several verbs: words that are settings, folders named by the time, tables on the
terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from discreet.run_files.csv_text import cell_text

WIDE = 240  # width of a table that goes to a file or a pipe, in characters
Words = Annotated[list[str] | None, typer.Argument(metavar="SETTING=VALUE ...")]


def new_folder(begin: str) -> Path:
    """A folder whose name is `begin` and the time in UTC."""
    return Path(f"{begin}{datetime.now(UTC):%Y-%m-%d_%H-%M-%S}")


def print_table(rows: Sequence[dict[str, object]] | Sequence[dict[str, str]]) -> None:
    """Prints a row for each of `rows`, with a column for each name that appears in any of them;
    nothing without columns."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*columns)
    for row in rows:
        table.add_row(*(cell_text(row.get(name), digits=4) for name in columns))
    if columns:
        console = Console() if sys.stdout.isatty() else Console(width=WIDE)
        # Printed by Python: the console's own print ends the process if nobody reads the output.
        with console.capture() as captured:
            console.print(table)
        print(captured.get(), end="")
