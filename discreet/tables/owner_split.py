"""Splits a table by owner into a training set and a public test set."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from discreet.data.cells import owner_cells
from discreet.data.csv_table import CsvTable, lines_of
from discreet.data.targets import FolderError
from discreet.privacy.person import OPTION, folded_key
from discreet.run_files.whole_files import replace_file
from discreet.tables.header import column_place, names_in

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
    """Writes train.csv and test.csv beside a CSV file, in this order, with unchanged rows. All rows
    of an owner are in the same part; without `owner` each row is its own owner.

    Raises FolderError: the file can't be read, an owner is empty, an output file exists already
    with other rows, or a part has no row.
    """
    if not 0 < share < 1:
        raise FolderError(f"--test must be a share within (0, 1) (got {share:g})")
    paths = [table.path.with_name(name) for name in ("train.csv", "test.csv")]
    names_in(table)  # refuses a file of one column, which may have another separator
    place = None
    if owner is not None:
        place = column_place(owner, table)
    parts: tuple[list[list[str]], list[list[str]]] = ([], [])
    owners: tuple[set[str], set[str]] = (set(), set())
    rows = [row for _, row in table.rows()]
    if place is None:
        names = [str(number) for number in range(len(rows))]
    else:
        with lines_of(table.path, table):
            cells = [row[place] for row in rows]
            names = owner_cells(cells, str(owner), ids, choice=OPTION).tolist()
    for name, row in zip(names, rows, strict=True):
        tested = is_tested(name, share)
        parts[tested].append(row)
        owners[tested].add(name)
    if not any(parts):
        raise FolderError(f"{table.path} has no rows below its header")
    if not all(parts):
        raise FolderError(f"{table.path}: one part is empty: use another share than {share:g}")
    texts = [table.with_rows(some).encode() for some in parts]
    for path, text in zip(paths, texts, strict=True):
        # A split that was killed after its first file has left that one.
        if path.exists() and path.read_bytes() != text:
            raise FolderError(f"{path} is there already")
    for path, text in zip(paths, texts, strict=True):
        replace_file(path, text)
    return [
        Part(path, len(some), len(whose))
        for path, some, whose in zip(paths, parts, owners, strict=True)
    ]
