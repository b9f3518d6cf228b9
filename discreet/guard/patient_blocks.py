"""A site's patients in blocks: a keyed hash of the patient's id alone chooses each patient's block.

A patient's block depends on no other patient. So adding, removing or changing a patient changes one
block and leaves the others as they were: blocks contain no count of all rows, no list of all
categories, and no file date.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from discreet.data.csv_table import CsvTable
from discreet.data.description import DESCRIPTION, read_description
from discreet.data.targets import FolderError
from discreet.guard.site_blocks import BLOCKS, KEY, SPLIT, BlockSplit, archive_of
from discreet.privacy.person import folded_key
from discreet.run_files.whole_files import new_folder
from discreet.settings.foreign_files import read_text
from discreet.settings.rules import ConfigError
from discreet.tables.rows_by_person import FORMS, form_of, keys_of, rows_by_person

FOLDERS = "folders"  # the id of data in which each patient is a folder
KEY_BYTES = 32
# A line of TOML up to its comment, where quotes are in pairs.
COMMENT = re.compile(r"""^((?:[^#"']|"(?:[^"\\]|\\.)*"|'[^']*')*)#.*$""")
Files = dict[str, bytes]  # the files of a block by their names


def block_of(patient: str, *, key: bytes, count: int) -> int:
    """The number of a patient's block: HMAC-SHA-256 of the id under any spelling, modulo the number
    of blocks."""
    digest = hmac.new(key, folded_key(patient).encode(), hashlib.sha256).digest()
    return int.from_bytes(digest, "big") % count


def split_site(
    data: Path | CsvTable, folder: Path, *, id_column: str, count: int, ids: str | None = None
) -> BlockSplit:
    """Splits a site's data into blocks, once, and writes key and blocks to `folder`, for its owner
    alone.

    `data` is a table (csv, jsonl, parquet or npz), a folder with a data.toml that names one, or
    with `folders` as the id a folder that holds a folder for each patient. Without an id, for one
    block, any folder or file. A `CsvTable` is a CSV file with its encoding, and becomes blocks in
    UTF-8. `ids`: EXACT or FOLDED, what two spellings of an id mean; by default as data.toml says.
    Each block tells the types and shapes in a parquet or npz file: see `check_types`.

    Raises:
      ConfigError: the data can't be split, or `folder` exists already: a new key would make a
        different split.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists already: a site is split once and keeps its key")
    if isinstance(data, CsvTable):
        path = data.path
    else:
        path = data
    if not path.exists():
        raise ConfigError(f"{path} does not exist")
    key = secrets.token_bytes(KEY_BYTES)
    try:
        if isinstance(data, CsvTable):
            patients, files_of = _encoded_table(data, id_column, ids)
        else:
            patients, files_of = _read(data, id_column, ids)
    except FolderError as error:
        raise ConfigError(str(error)) from error
    if not patients:
        raise ConfigError(f"{path} has no patients")

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


def check_types(data: Path, id_column: str) -> None:
    """Raises ConfigError for a table whose blocks would tell types that follow from all of its
    rows, and for a data.toml that can't be read."""
    if id_column in ("", FOLDERS) or not data.exists():
        return
    path = data
    if not data.is_file():
        try:
            path = data / read_description(data).file
        except FolderError as error:
            raise ConfigError(str(error)) from error
    if form_of(path) in ("parquet", "npz"):
        raise ConfigError(
            f"{path}: each block would have the types and shapes of the whole file, which "
            "one patient can change (a long text, a missing number). Give .csv or .jsonl, or say "
            "--public-types if a public form fixes them, as for images of one size"
        )


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
        return _table(CsvTable(data), id_column, ids, "utf-8")
    description = read_description(data)
    if description.test is not None:
        raise FolderError(
            f"{data / DESCRIPTION} names a test set, which every block would contain: remove it"
        )
    path = data / description.file
    table = CsvTable(path, description.separator, description.encoding)
    encoding = table.encoding or "utf-8"  # as the description beside each block says
    patients, files_of = _table(table, id_column, ids or description.ids, encoding)
    beside = {DESCRIPTION: without_comments(data / DESCRIPTION)}
    return patients, lambda places: files_of(places) | beside


def without_comments(path: Path) -> bytes:
    """A description without its comments: `data check` writes there what it has read of patients.
    FolderError: they can't be told from texts."""
    text = read_text(path, FolderError)
    lines = [COMMENT.sub(r"\1", line).rstrip() for line in text.splitlines()]
    bare = "".join(f"{line}\n" for line in lines if line)
    try:
        is_same = tomllib.loads(bare) == tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        is_same = False
    if not is_same:
        raise FolderError(f"{path}: remove its comments, which every block would contain")
    return bare.encode()


def _whole(data: Path) -> _Blocks:
    """All data of the site as one unit."""
    if data.is_dir():
        files = dict(_files_below(data, data))
    else:
        files = {data.name: data.read_bytes()}
    return ["site"], lambda places: files if places else {}


def _folders(data: Path, ids: str | None) -> _Blocks:
    if not data.is_dir():
        raise FolderError(f"--id {FOLDERS}: {data} is not a folder with one for each patient")
    folders = sorted(data.iterdir())
    for path in folders:
        if path.is_symlink() or not path.is_dir():
            raise FolderError(f"{path} is not a folder of one patient")

    def files_of(places: Sequence[int]) -> Files:
        return dict(each for place in places for each in _files_below(folders[place], data))

    names = [path.name for path in folders]
    return keys_of(names, ids, lambda row: f"{folders[row]}"), files_of


def _files_below(folder: Path, root: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise FolderError(f"{path} is a link: a block may contain regular files only")
        if path.is_file():
            yield str(path.relative_to(root)), path.read_bytes()


def _encoded_table(table: CsvTable, id_column: str, ids: str | None) -> _Blocks:
    """A CSV file with a given encoding, which no description tells the readers of a block."""
    if not table.path.is_file() or form_of(table.path) != "csv" or id_column in ("", FOLDERS):
        raise FolderError(
            f"{table.path}: --encoding goes with a CSV file and the --id of its patients (of a "
            "folder data.toml says it)"
        )
    return _table(table, id_column, ids, "utf-8")


def _table(table: CsvTable, id_column: str, ids: str | None, encoding: str) -> _Blocks:
    """The rows of a table. `encoding`: of the blocks of a CSV file."""
    path = table.path
    if path.suffix.lower().removeprefix(".") not in FORMS:
        raise FolderError(f"{path}: a table of patients must end in .csv, .jsonl, .parquet or .npz")
    patients, content_of = rows_by_person(table, id_column, ids=ids, encoding=encoding)
    return patients, lambda places: {path.name: content_of(places)}
