"""Splits a table by owner into a training set and a public test set: a public hash of the owner
alone chooses the part, as a secret one chooses the block at a site (`guard/patient_blocks.py`)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from discreet.data.csv_table import CsvTable
from discreet.data.targets import FolderError
from discreet.privacy.person import folded_key
from discreet.run_files.whole_files import replace_file
from discreet.tables.rows_by_person import form_of, rows_by_person

# public: an owner's name alone decides if it is in the test set
SALT = b"discreet data split 20753:"


@dataclass(frozen=True)
class Part:
    """A part of a table: its file, and the numbers of rows and owners in it."""

    path: Path
    rows: int
    owners: int


def is_tested(owner: str, share: float) -> bool:
    """True for a share of all owners, by a public hash: the same owner is always in the same part,
    under any spelling."""
    digest = hashlib.blake2b(SALT + folded_key(owner).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def split_by_owner(
    table: CsvTable, *, owner: str | None, share: float, ids: str | None = None
) -> list[Part]:
    """Writes train and test beside a file, in this order and in its form (csv, jsonl, parquet or
    npz), with unchanged rows. All rows of an owner are in the same part; without `owner` each row
    is its own owner.

    Raises FolderError: the file can't be read, an owner is empty, an output file exists already
    with other rows, or a part has no row.
    """
    if not 0 < share < 1:
        raise FolderError(f"--test must be a share within (0, 1) (got {share:g})")
    names, content_of = rows_by_person(table, owner, ids=ids)
    parts: tuple[list[int], list[int]] = ([], [])
    for row, name in enumerate(names):
        parts[is_tested(name, share)].append(row)
    if not names:
        raise FolderError(f"{table.path} has no rows below its header")
    if not all(parts):
        raise FolderError(f"{table.path}: one part is empty: use another share than {share:g}")
    form = form_of(table.path)
    paths = [table.path.with_name(f"{name}.{form}") for name in ("train", "test")]
    contents = [content_of(part) for part in parts]
    for path, content in zip(paths, contents, strict=True):
        # A split that was killed after its first file has left that one.
        if path.exists() and path.read_bytes() != content:
            raise FolderError(f"{path} is there already")
    for path, content in zip(paths, contents, strict=True):
        replace_file(path, content)
    return [
        Part(path, len(part), len({names[row] for row in part}))
        for path, part in zip(paths, parts, strict=True)
    ]
