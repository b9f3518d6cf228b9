"""The names of the columns of a table."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from discreet.data.csv_table import CsvTable
from discreet.data.description import DataDescription
from discreet.data.targets import FolderError
from discreet.settings.rules import brief

NUMBER = re.compile(r"[+-]?\d+([.,]\d+)?", re.ASCII)
YEAR = re.compile(r"(19|20)\d\d", re.ASCII)


def names_in(table: CsvTable) -> list[str]:
    """The names of the columns. FolderError: there is only one, which has several reasons."""
    names = table.header()
    if len(names) == 1:
        raise FolderError(
            f"{table.path} has one column, {brief(names[0])}. If another sign than , ; | or a tab "
            "separates the columns, give it with --separator. Remove lines above the header"
        )
    return names


def header_hint(table: CsvTable) -> str | None:
    """A sentence on a header that looks like a row of data; None for one that looks like names,
    which may be years or the numbers of the columns."""
    names = table.header()
    numbers = [name for name in names if NUMBER.fullmatch(name)]
    counted = any(names == [str(at + first) for at in range(len(names))] for first in (0, 1))
    if counted or not numbers or all(map(YEAR.fullmatch, numbers)):
        return None
    return (
        f'the header "{brief(", ".join(names))}" looks like data: if the file has no header, write '
        "the names of the columns in a line above"
    )


def column_place(name: str, table: CsvTable) -> int:
    """The place of a column. FolderError: there is none of this name."""
    names = names_in(table)
    if name not in names:
        raise FolderError(f"{table.path} has no column {name}; there are {brief(', '.join(names))}")
    return names.index(name)


def require_described(path: Path, names: Collection[str], description: DataDescription) -> None:
    """Raises FolderError if a table lacks columns that its description names."""
    inputs = description.inputs
    described = dict.fromkeys(
        (
            *description.target_names,
            *((description.owner,) if description.owner is not None else ()),
            *(column.in_file for column in description.columns),
            *(inputs if isinstance(inputs, tuple) else ()),
        )
    )
    missing = [name for name in described if name not in names]
    if missing:
        raise FolderError(
            f"{path} has no column {brief(', '.join(missing))}; there are {brief(', '.join(names))}"
        )
