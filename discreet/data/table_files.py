"""Tables in other formats than CSV: parquet, jsonl and npz."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from discreet.data.targets import Array, FolderError
from discreet.settings.foreign_files import one_line, read_text
from discreet.settings.rules import require_extra


@dataclass(frozen=True, eq=False, repr=False)  # so that its text has no cell
class JsonColumn:
    """The cells of one key in a jsonl file, each as its own line has it: a type of the whole column
    would follow from the rows of others."""

    cells: list[Any]

    def __len__(self) -> int:
        return len(self.cells)

    def __array__(self, *_: Any, **options: Any) -> Array:
        return np.fromiter(self.cells, object, len(self.cells))

    def to_pylist(self) -> list[Any]:
        return self.cells


def file_in(folder: Path, name: str) -> Path:
    """The file of that name in a folder. FolderError: there is none, or it lies elsewhere."""
    path = folder / name
    if "\0" in name or path.resolve().parent != folder.resolve():
        raise FolderError(f"{name} must be directly in {folder}")
    if not path.is_file():
        raise FolderError(f"{path} is missing")
    return path


def open_table(path: Path, form: str) -> dict[str, Any]:
    """The columns (parquet: of pyarrow; jsonl: `JsonColumn`) or the arrays (npz; of numpy) of a
    file by their names. FolderError: it can't be read, or two columns have one name."""
    if form == "jsonl":
        rows = [row for _, row in json_rows(path)]
        keys = dict.fromkeys(key for row in rows for key in row)
        return {key: JsonColumn([row.get(key) for row in rows]) for key in keys}
    if form == "npz":
        with one_line(path, FolderError):
            return _arrays_in(path)
    require_extra("pyarrow", why=path.name)
    with one_line(path, FolderError):
        table = _parquet_table(path)
    names = list(table.column_names)
    for name, count in Counter(names).items():
        if count > 1:
            raise FolderError(f"{path}: the column {name!r} occurs twice")
    return dict(zip(names, table.columns, strict=True))


def _arrays_in(path: Path) -> dict[str, Array]:
    with path.open("rb") as file, np.lib.npyio.NpzFile(file, allow_pickle=False) as arrays:
        return dict(arrays)


def _parquet_table(path: Path) -> Any:
    from pyarrow import parquet  # type: ignore[import-untyped]

    table = parquet.read_table(path)
    table.validate(full=True)  # otherwise a text that is not UTF-8 fails where it is read
    return table


def json_rows(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The lines of a jsonl file but empty ones, each as it is written and as an object.
    FolderError: one is none."""
    text = read_text(path, FolderError)
    found = []
    with one_line(path, FolderError):
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                found.append((line, _object_in(line, f"{path}, line {number}")))
    return found


def _object_in(line: str, place: str) -> dict[str, Any]:
    try:
        found = json.loads(line, object_pairs_hook=_with_each_key_once)
        if "\\u" in line:
            json.dumps(found, ensure_ascii=False).encode()  # half a character is no text
    except ValueError:  # its message may have cells
        found = None
    if not isinstance(found, dict):
        raise FolderError(f"{place} must be a JSON object, with each key once and in UTF-8")
    return found


def _with_each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found
