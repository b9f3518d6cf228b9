"""Cells outside the public range of their column, which a run counts as the range's nearer end."""

from __future__ import annotations

from pathlib import Path

from discreet.data.columns import DATE, NUMBER
from discreet.data.csv_table import CsvTable
from discreet.data.description import DataDescription
from discreet.data.encoding import shares_of_range


def cells_outside(folder: Path, description: DataDescription) -> dict[str, int]:
    """The number of cells outside low..high in each column of numbers or dates of a CSV file;
    columns without any are left out."""
    if description.format != "csv":
        return {}
    path = folder / description.file
    table = CsvTable(path, description.separator, description.encoding, description.decimal)
    cells = table.columns(as_text=True)
    found = {}
    for column in description.columns:
        if column.kind in (NUMBER, DATE):
            written = cells[column.in_file].to_pylist()
            shares, _ = shares_of_range(column, written, description.decimal)
            if count := int(((shares < 0) | (shares > 1)).sum()):
                found[column.name] = count
    return found
