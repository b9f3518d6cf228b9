"""Columns of a table as arrays: numbers, encoded cells, class numbers, owners. Errors name the row
and never show its content."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from discreet.data.cell_reading import CellError, Marks, number_in
from discreet.data.description import DataDescription
from discreet.data.empty_cells import is_empty
from discreet.data.encoding import encoded_columns
from discreet.data.targets import Array, FolderError
from discreet.per_example.objective import PADDING
from discreet.privacy.person import (
    FOLDED,
    KEY,
    LARGEST_EXACT,
    OtherSpelling,
    person_key,
    person_keys,
)

INDEX = ("", "Unnamed: 0", "__index_level_0__")  # the names of an index that pandas writes


def numbers_rows(cells: Sequence[object]) -> bool:
    """True for the numbers of the rows, from 0 or 1, as pandas and R write them."""
    written = [str(cell).strip() for cell in cells]
    return any(written == [str(at + first) for at in range(len(cells))] for first in (0, 1))


def encoded_cells(found: Mapping[str, Any], description: DataDescription) -> Array:
    cells = {column.in_file: found[column.in_file].to_pylist() for column in description.columns}
    marks = description.marks
    return encoded_columns(
        cells,
        description.columns,
        description.pairs,
        decimal=marks.decimal,
        thousands=marks.thousands,
    )


def owner_cells(column: Any, name: str, ids: str | None = None, *, choice: str = KEY) -> Array:
    """The owner in each row's cell, as `person_keys` has it; whole numbers stay numbers. A row
    without an owner would count as one more person."""
    owners = np.asarray(column)
    cells = owners.tolist()
    for row, cell in enumerate(cells):
        if isinstance(cell, dict | list | np.ndarray):
            raise CellError(
                row, f"{name} is a list or an object: it must name the owner of the row"
            )
        if is_empty(cell):
            raise CellError(row, f"{name} is empty: it must name the owner of the row")
        if isinstance(cell, float) and abs(cell) >= LARGEST_EXACT:
            raise CellError(row, f"{name} has too many digits for a number: describe [columns]")
    if owners.dtype.kind in "iu":
        return owners
    try:
        return np.asarray(person_keys(cells, ids, choice=choice))
    except OtherSpelling as error:
        raise CellError(error.row, f"{name}: {error}", error.before) from error


def same_names(owners: Array, ids: str | None = None) -> Array:
    """Owners as text, equal for spellings that may be the same person's in tables that were read
    with other types: 007 in a column of numbers is 7. With EXACT only equal texts are equal.

    >>> same_names(np.array(["007", "A7"])).tolist(), same_names(np.array([7, 12])).tolist()
    (['7', 'a7'], ['7', '12'])
    """
    return np.asarray([person_key(owner, ids or FOLDED) for owner in owners.tolist()])


def owner_numbers(owners: Array) -> Array:
    """A number for each row's owner, (n,) int64, which follows from its name alone: a rank would
    change with the names of others."""
    names, places = np.unique(owners, return_inverse=True)
    digests = [hashlib.blake2b(str(name).encode(), digest_size=8).digest() for name in names]
    return np.array([int.from_bytes(each, "big") >> 1 for each in digests], np.int64)[places]


def numbers_in(column: Any, name: str, marks: Marks) -> Array:
    """The numbers of a column, none of them empty."""
    quick = np.asarray(column)
    if quick.dtype.kind in "iuf" and np.isfinite(quick).all():
        return quick.astype(np.float64)
    described = "or describe it under [columns] in data.toml"
    empty = f"is empty: fill it with a public constant, {described}"
    wrong = f"is not a number: make it one, {described}"
    return _numbers_of(column.to_pylist(), marks, f"{name} {empty}", f"{name} {wrong}")


def _numbers_of(cells: list[Any], marks: Marks, empty: str, wrong: str) -> Array:
    """Cells as numbers. `empty`, `wrong`: what is said of a cell that is empty, or no number."""
    found = np.zeros(len(cells))
    for row, cell in enumerate(cells):
        if is_empty(cell):
            raise CellError(row, empty)
        try:
            found[row] = number_in(cell, marks)
        except ValueError:
            raise CellError(row, wrong) from None
    return found


def numbered(targets: Array, name: str, description: DataDescription) -> Array:
    """Classes as numbers; words by their positions in `classes`. A time is its number."""
    is_time = bool(description.times) and name == description.target
    if is_time or not description.classes:
        return _target_numbers(targets, name, description)
    places = {word.strip(): place for place, word in enumerate(description.classes)}
    places |= {word: places[known] for word, known in description.class_words.items()}
    if description.padding is not None:
        places[str(description.padding)] = PADDING
    words = [str(value).strip() for value in targets.flat]
    for place, word in enumerate(words):
        if word not in places:
            if is_empty(targets.flat[place]):
                problem = f"{name} is empty: leave the row out, or fill it"
            else:
                problem = f"{name} is not one of classes: add the class in data.toml, or correct it"
            raise CellError(place * len(targets) // targets.size, problem)
    return np.asarray([places[word] for word in words], np.int64).reshape(targets.shape)


def _target_numbers(targets: Array, name: str, description: DataDescription) -> Array:
    if targets.dtype.kind in "OUS":  # cells as they are written
        empty = f"{name} is empty: leave the row out, or fill it"
        wrong = (
            f"{name} is not a number: correct it, or list its words in classes, that for the "
            'outcome or event second, such as classes = ["no", "yes"]'
        )
        numbers = _numbers_of(targets.ravel().tolist(), description.marks, empty, wrong)
        return numbers.reshape(targets.shape)
    if targets.dtype.kind not in "iufb":  # a day is counted in days, or in seconds beside a time
        raise FolderError(
            f"{description.file}: targets must be numbers, or words listed in classes"
        )
    return targets.astype(np.float64)
