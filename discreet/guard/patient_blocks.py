"""A site's patients in blocks: a keyed hash of the patient's id alone chooses each patient's block.

A patient's block depends on no other patient. So adding, removing or changing a patient changes one
block and leaves the others as they were: blocks contain no count of all rows, no list of all
categories, and no file date.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from discreet.data.csv_table import CsvTable
from discreet.data.description import DESCRIPTION, read_description
from discreet.data.empty_cells import is_empty
from discreet.data.table_files import open_table
from discreet.data.targets import FolderError
from discreet.guard.site_blocks import BLOCKS, KEY, SPLIT, BlockSplit, archive_of
from discreet.privacy.person import OPTION, OtherSpelling, folded_key, person_keys
from discreet.run_files.whole_files import new_folder
from discreet.settings.foreign_files import read_text
from discreet.settings.rules import ConfigError
from discreet.tables.header import column_place

FOLDERS = "folders"  # the id of data in which each patient is a folder
KEY_BYTES = 32
Files = dict[str, bytes]  # the files of a block by their names
Cells = NDArray[Any]


def block_of(patient: str, *, key: bytes, count: int) -> int:
    """The number of a patient's block: HMAC-SHA-256 of the id under any spelling, modulo the number
    of blocks."""
    digest = hmac.new(key, folded_key(patient).encode(), hashlib.sha256).digest()
    return int.from_bytes(digest, "big") % count


def split_site(
    data: Path, folder: Path, *, id_column: str, count: int, ids: str | None = None
) -> BlockSplit:
    """Splits a site's data into blocks, once, and writes key and blocks to `folder`, for its owner
    alone.

    `data` is a table (csv, jsonl, parquet or npz), a folder with a data.toml that names one, or
    with `folders` as the id a folder that holds a folder for each patient. Without an id, for one
    block, any folder or file. `ids`: EXACT or FOLDED, what two spellings of an id mean; by default
    as data.toml says.

    Raises:
      ConfigError: the data can't be split, or `folder` exists already: a new key would make a
        different split.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists already: a site is split once and keeps its key")
    key = secrets.token_bytes(KEY_BYTES)
    try:
        patients, files_of = _read(data, id_column, ids)
    except FolderError as error:
        raise ConfigError(str(error)) from error

    members: list[list[int]] = [[] for _ in range(count)]
    for place, patient in enumerate(patients):
        members[block_of(patient, key=key, count=count)].append(place)

    with new_folder(folder, mode=0o700) as made:
        (made / BLOCKS).mkdir(mode=0o700)
        _write(made / KEY, key)
        digests = []
        for number, places in enumerate(members):
            archive = archive_of(files_of(places))
            digests.append(hashlib.sha256(archive).hexdigest())
            _write(made / BLOCKS / f"{number:05d}.tar", archive)
        split = BlockSplit(id_column, count, len(set(patients)), digests)
        _write(made / SPLIT, json.dumps(asdict(split)).encode())
    return split


def mock_archive(folder: Path) -> bytes:
    """The archive of a folder of public rows, as one block."""
    return archive_of(dict(_files_below(folder, folder)))


def _write(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


_Blocks = tuple[list[str], Callable[[Sequence[int]], Files]]


def _read(data: Path, id_column: str, ids: str | None) -> _Blocks:
    """The patient of each row or folder, and a function that writes the rows or folders of given
    positions to a block's files."""
    if not id_column:
        return _whole(data)
    if id_column == FOLDERS:
        return _folders(data, ids)
    if data.is_file():
        return _table(data, id_column, CsvTable(data), ids)
    description = read_description(data)
    if description.test is not None:
        raise FolderError(
            f"{data / DESCRIPTION} names a test set, which every block would contain: remove it"
        )
    path = data / description.file
    table = CsvTable(path, description.separator, description.encoding)
    patients, files_of = _table(path, id_column, table, ids or description.ids)
    beside = {DESCRIPTION: (data / DESCRIPTION).read_bytes()}
    return patients, lambda places: files_of(places) | beside


def _whole(data: Path) -> _Blocks:
    """All data of the site as one unit."""
    if data.is_dir():
        files = dict(_files_below(data, data))
    else:
        files = {data.name: data.read_bytes()}
    return ["site"], lambda places: files if places else {}


def _folders(data: Path, ids: str | None) -> _Blocks:
    folders = sorted(data.iterdir())
    for path in folders:
        if path.is_symlink() or not path.is_dir():
            raise FolderError(f"{path} is not a folder of one patient")

    def files_of(places: Sequence[int]) -> Files:
        return dict(each for place in places for each in _files_below(folders[place], data))

    names = [path.name for path in folders]
    return _keys(names, ids, lambda row: f"{folders[row]}"), files_of


def _keys(cells: Sequence[object], ids: str | None, place_of: Callable[[int], str]) -> list[str]:
    """The patients' keys. FolderError: two spellings may be one patient's."""
    try:
        return person_keys(cells, ids, choice=OPTION)
    except OtherSpelling as error:
        places = f"{place_of(error.row)} and {place_of(error.before)}"
        raise FolderError(f"{places}: {error}") from error


def _files_below(folder: Path, root: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise FolderError(f"{path} is a link: a block may contain regular files only")
        if path.is_file():
            yield str(path.relative_to(root)), path.read_bytes()


def _table(path: Path, id_column: str, table: CsvTable, ids: str | None) -> _Blocks:
    """The rows of a file. `table`: the same file, as CSV."""
    readers = {"jsonl": _jsonl, "parquet": _parquet, "npz": _npz}
    kind = path.suffix.lower().removeprefix(".")
    if kind == "csv":
        cells, content_of = _csv(table, id_column)
    elif kind in readers:
        cells, content_of = readers[kind](path, id_column)
    else:
        raise FolderError(f"{path}: a table of patients must end in .csv, .jsonl, .parquet or .npz")

    def place_of(row: int) -> str:
        return f"{path}, {table.place_of(row) if kind == 'csv' else f'row {row + 1}'}"

    for row, cell in enumerate(cells):
        if isinstance(cell, bool | float) or is_empty(cell):
            raise FolderError(
                f"{place_of(row)}: the patient's id must be a text or a whole number, and not "
                "empty (n/a is empty)"
            )
    patients = _keys(cells, ids, place_of)
    return patients, lambda places: {path.name: content_of(places)}


_Rows = tuple[Sequence[object], Callable[[Sequence[int]], bytes]]


def _csv(table: CsvTable, id_column: str) -> _Rows:
    """Blocks have the separator and the declared encoding of the whole table; UTF-8 if none is."""
    where = column_place(id_column, table)
    rows = [row for _, row in table.rows()]

    def content_of(places: Sequence[int]) -> bytes:
        text = table.with_rows(rows[place] for place in places)
        return text.encode(table.encoding or "utf-8")

    return [row[where] for row in rows], content_of


def _jsonl(path: Path, id_column: str) -> _Rows:
    text = read_text(path, FolderError).removeprefix("\ufeff")
    lines = [line for line in text.split("\n") if line.strip()]
    cells = []
    for row, line in enumerate(lines):
        found = None
        with suppress(ValueError, RecursionError):
            found = json.loads(line)
        if not isinstance(found, dict):
            raise FolderError(f"{path}, row {row + 1} is not a JSON object")
        cells.append(found.get(id_column))
    return cells, lambda places: "".join(f"{lines[place]}\n" for place in places).encode()


def _parquet(path: Path, id_column: str) -> _Rows:
    columns = open_table(path, "parquet")
    if id_column not in columns:
        raise FolderError(f"{path} has no column {id_column}")
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

    return table.column(id_column).to_pylist(), content_of


def _npz(path: Path, id_column: str) -> _Rows:
    arrays: dict[str, Cells] = open_table(path, "npz")
    if id_column not in arrays or arrays[id_column].ndim != 1:
        raise FolderError(f"{path} must have an array {id_column} with one id per row")
    rows = len(arrays[id_column])
    for name, values in arrays.items():
        if values.ndim < 1 or len(values) != rows:
            raise FolderError(
                f"{path}: {name} must have {rows} rows, one per id; otherwise every "
                "block would contain all of it"
            )

    def content_of(places: Sequence[int]) -> bytes:
        sink = io.BytesIO()
        taken = {name: values[np.asarray(places, np.int64)] for name, values in arrays.items()}
        np.savez(sink, allow_pickle=False, **taken)
        return sink.getvalue()

    return arrays[id_column].tolist(), content_of
