"""Cells that can't be read, and cells that a run reads as something else: outside the public range
of their column, or of no level."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from discreet.data.columns import CATEGORY, TEXT, Column
from discreet.data.description import DataDescription
from discreet.data.encoding import Reading, range_of, read_cells
from discreet.data.targets import FolderError


@dataclass(frozen=True)
class CellCounts:
    """The counts of a column.

    Attributes:
      wrong: cells that can't be read.
      first: the row, from 0, and the problem of the first of them.
      outside: numbers and dates outside low..high.
      unlisted: words of no level.
    """

    name: str
    wrong: int
    first: tuple[int, str] | None
    outside: int
    unlisted: int

    def lines(self, place_of: Callable[[int], str]) -> Iterator[str]:
        """The counts that are not 0, each as a sentence. `place_of`: the words for a row."""
        name = self.name
        if self.first is not None:
            row, problem = self.first
            yield f"{name}: {self.wrong} cells can't be read. {place_of(row)}: it {problem}"
        if self.outside:
            yield (
                f"{name}: {self.outside} cells are outside low..high, and count as the nearer end. "
                "If they are codes for empty cells, such as -9, list them in empty"
            )
        if self.unlisted:
            yield f"{name}: {self.unlisted} cells are no level, and count as another"


def readings_of(
    table: Mapping[str, Sequence[Any]], description: DataDescription
) -> dict[str, Reading]:
    """The cells of each column under [columns] but texts, by its name, as they are read. `table`:
    the cells by column of the file. FolderError: one is missing."""
    readings = {}
    for column in description.columns:
        if column.in_file not in table:
            raise FolderError(f"{description.file} has no column or array {column.in_file}")
        if column.kind != TEXT:
            cells = table[column.in_file]
            readings[column.name] = read_cells(column, cells, description.marks)
    return readings


def cell_counts(readings: Mapping[str, Reading], description: DataDescription) -> list[CellCounts]:
    """The counts of each column that was read."""
    read = (column for column in description.columns if column.name in readings)
    return [_counted(column, readings[column.name]) for column in read]


def _counted(column: Column, reading: Reading) -> CellCounts:
    strange = ~reading.empty & ~reading.below  # "<4,5" is read as half of it, below any range
    strange[[row for row, _ in reading.wrong]] = False
    outside = 0
    unlisted = 0
    if column.kind == CATEGORY:
        unlisted = int((strange & (reading.values == len(column.levels))).sum())
    else:
        low, high = range_of(column)
        outside = int((strange & ((reading.values < low) | (reading.values > high))).sum())
    first = next(iter(reading.wrong), None)
    return CellCounts(column.name, len(reading.wrong), first, outside, unlisted)
