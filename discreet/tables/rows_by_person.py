"""The rows of a table by person, and some of them as a file of the same form: for a split of a
table, into a training set and a test set or into the blocks of a site.

A file of some rows tells nothing of the others: it has no list of all categories, no count of all
rows, and no date. Types and shapes of the arrays of an npz file and of the columns of a parquet
file are those of the whole file, which may follow from any of its rows.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from discreet.data.csv_table import CsvTable
from discreet.data.empty_cells import is_empty
from discreet.data.table_files import json_rows, open_table
from discreet.data.targets import FolderError
from discreet.privacy.person import OPTION, OtherSpelling, person_keys
from discreet.tables.header import column_place, names_in

Cells = NDArray[Any]
Content = Callable[[Sequence[int]], bytes]
FORMS = ("csv", "jsonl", "parquet", "npz")


def rows_by_person(
    table: CsvTable, id_column: str | None, *, ids: str | None = None, encoding: str = "utf-8"
) -> tuple[list[str], Content]:
    """The person of each row of a file (csv, jsonl, parquet or npz), and a function that writes the
    rows at given positions as such a file.

    `table`: the file, with the separator and the encoding that hold if it is CSV. `id_column`: None
    if each row is a person of its own; equal rows are copies, and one person's.
    `ids`: EXACT or FOLDED, what two spellings of an id mean. `encoding`: of what is written, if it
    is CSV.

    Raises FolderError: the file can't be read, a row has no id, or two spellings may be one
    person's.
    """
    path = table.path
    readers = {"jsonl": _jsonl, "parquet": _parquet, "npz": _npz}
    kind = form_of(path)
    if kind in readers:
        cells, content_of = readers[kind](path, id_column)
    else:
        cells, content_of = _csv(table, id_column, encoding)

    def place_of(row: int) -> str:
        return f"row {row + 1}" if kind in readers else table.place_of(row)

    for row, cell in enumerate(cells):
        if isinstance(cell, bool | float | dict | list) or is_empty(cell):
            raise FolderError(
                f"{path}, {place_of(row)}: the id in {id_column} must be a text or a whole number, "
                "and not empty (n/a is empty)"
            )
    return keys_of(cells, ids, place_of, f"{path}, "), content_of


def form_of(path: Path) -> str:
    """The form of a file by its ending: CSV if that tells none."""
    kind = path.suffix.lower().removeprefix(".")
    return kind if kind in FORMS else "csv"


def keys_of(
    cells: Sequence[object], ids: str | None, place_of: Callable[[int], str], file: str = ""
) -> list[str]:
    """The persons' keys. FolderError: two spellings may be one person's. `place_of`: the words for
    a row. `file`: those before it."""
    try:
        return person_keys(cells, ids, choice=OPTION)
    except OtherSpelling as error:
        places = f"{place_of(error.row)} and {place_of(error.before)}"
        raise FolderError(f"{file}{places}: {error}") from error


_Rows = tuple[Sequence[object], Content]


def _csv(table: CsvTable, id_column: str | None, encoding: str) -> _Rows:
    names_in(table)  # refuses a file of one column, which may have another separator
    rows = [row for _, row in table.rows()]
    if id_column is None:
        cells = _first_places(map(tuple, rows))
    else:
        where = column_place(id_column, table)
        cells = [row[where] for row in rows]
    return cells, lambda places: table.with_rows(rows[each] for each in places).encode(encoding)


def _first_places(rows: Iterable[object]) -> list[object]:
    """The first row that is equal to each one: copies of a row are one person's."""
    first = dict[object, int]()
    return [first.setdefault(row, at) for at, row in enumerate(rows)]


def _jsonl(path: Path, id_column: str | None) -> _Rows:
    rows = json_rows(path)
    lines = [line for line, _ in rows]
    if id_column is None:
        cells = _first_places(lines)
    else:
        cells = [row.get(id_column) for _, row in rows]
    return cells, lambda places: "".join(f"{lines[place]}\n" for place in places).encode()


def _parquet(path: Path, id_column: str | None) -> _Rows:
    columns = open_table(path, "parquet")
    import pyarrow as pa  # type: ignore[import-untyped]
    from pyarrow import parquet

    # A dictionary lists the values of all rows, and metadata may count them.
    plain = {
        name: column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column
        for name, column in columns.items()
    }
    table = pa.table(plain)

    def content_of(places: Sequence[int]) -> bytes:
        sink = io.BytesIO()
        rows = pa.array(places, pa.int64())  # an empty list would have no type
        parquet.write_table(table.take(rows), sink)
        return sink.getvalue()

    if id_column is None:
        lines = zip(*[map(str, column.to_pylist()) for column in table.columns], strict=True)
        return _first_places(lines), content_of
    if id_column not in columns:
        raise FolderError(f"{path} has no column {id_column}")
    return table.column(id_column).to_pylist(), content_of


def _npz(path: Path, id_column: str | None) -> _Rows:
    arrays: dict[str, Cells] = open_table(path, "npz")
    first = next(iter(arrays), "") if id_column is None else id_column
    if first not in arrays or arrays[first].ndim < 1:
        raise FolderError(f"{path} must have an array {first} with one value per row")
    rows = len(arrays[first])
    for name, values in arrays.items():
        if values.ndim < 1 or len(values) != rows:
            raise FolderError(
                f"{path}: {name} must have {rows} rows, as {first} has; otherwise every "
                "part would contain all of it"
            )

    def content_of(places: Sequence[int]) -> bytes:
        sink = io.BytesIO()
        at = np.asarray(places, np.int64)
        taken = {name: _own_width(values[at]) for name, values in arrays.items()}
        np.savez(sink, allow_pickle=False, **taken)
        return sink.getvalue()

    if id_column is None:
        bytes_of = [[row.tobytes() for row in values] for values in arrays.values()]
        return _first_places(zip(*bytes_of, strict=True)), content_of
    if arrays[id_column].ndim != 1:
        raise FolderError(f"{path}: {id_column} must have one id per row")
    return arrays[id_column].tolist(), content_of


def _own_width(values: Cells) -> Cells:
    """Texts in an array that is as wide as the longest of these alone."""
    if values.dtype.kind not in "US":
        return values
    return np.array(values.tolist(), dtype=values.dtype.kind).reshape(values.shape)
