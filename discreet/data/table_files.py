"""Tables in other formats than CSV: parquet, jsonl and npz."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from discreet.data.targets import Array, FolderError
from discreet.settings.foreign_files import one_line
from discreet.settings.rules import require_extra

MOST_BRACKETS = 200  # of a line that is not looked at closely


def file_in(folder: Path, name: str) -> Path:
    """The file of that name in a folder. FolderError: there is none, or it lies elsewhere."""
    path = folder / name
    if "\0" in name or path.resolve().parent != folder.resolve():
        raise FolderError(f"{name} must be directly in {folder}")
    if not path.is_file():
        raise FolderError(f"{path} is missing")
    return path


def open_table(path: Path, form: str, *, text: str | None = None) -> dict[str, Any]:
    """The columns (parquet, jsonl; of pyarrow) or the arrays (npz; of numpy) of a file by
    their names. `text`: a column whose cells are texts, also if all of them look like dates.
    FolderError: it can't be read, or two columns have one name."""
    if form == "npz":
        with one_line(path, FolderError):
            return _arrays_in(path)
    require_extra("pyarrow", why=path.name)
    with one_line(path, FolderError):
        table = _read_rows(path, form, text)
    names = list(table.column_names)
    for name, count in Counter(names).items():
        if count > 1:
            raise FolderError(f"{path}: the column {name!r} occurs twice")
    return dict(zip(names, table.columns, strict=True))


def _arrays_in(path: Path) -> dict[str, Array]:
    with path.open("rb") as file, np.lib.npyio.NpzFile(file, allow_pickle=False) as arrays:
        return dict(arrays)


def _read_rows(path: Path, form: str, text: str | None) -> Any:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import json as rows
    from pyarrow import parquet

    if form == "parquet":
        table = parquet.read_table(path)
    else:
        _check_depth(path)
        known = pyarrow.schema([(text, pyarrow.string())] if text else [])
        options = rows.ParseOptions(explicit_schema=known)
        table = rows.read_json(path, parse_options=options)
    table.validate(full=True)  # otherwise a text that is not UTF-8 fails where it is read
    return table


def _check_depth(path: Path) -> None:
    """Raises RecursionError for a line that is nested so deeply that pyarrow would end the
    process."""
    with path.open("rb") as lines:
        for line in lines:
            if line.count(b"[") + line.count(b"{") > MOST_BRACKETS:
                json.loads(line)
