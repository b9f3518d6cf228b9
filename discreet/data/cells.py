"""Columns of a table as arrays: numbers, encoded cells, class numbers, owners. Errors name the row
and never show its content."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from discreet.data.cell_reading import CellError, is_empty
from discreet.data.description import DataDescription
from discreet.data.encoding import encoded_columns
from discreet.data.targets import Array, FolderError
from discreet.per_example.objective import PADDING
from discreet.privacy.person import OtherSpelling, folded_key, person_key, person_keys

LARGEST_EXACT = 2.0**53  # beyond, float64 has no room for every whole number


def encoded_cells(found: Mapping[str, Any], description: DataDescription) -> Array:
    cells = {column.in_file: found[column.in_file].to_pylist() for column in description.columns}
    decimal = description.decimal
    return encoded_columns(cells, description.columns, description.pairs, decimal=decimal)


def owner_cells(column: Any, name: str, ids: str | None = None) -> Array:
    """The owner in each row's cell, as `person_keys` has it; whole numbers stay numbers. A row
    without an owner would count as one more person."""
    owners = np.asarray(column)
    cells = owners.tolist()
    for row, cell in enumerate(cells):
        if is_empty(cell):
            raise CellError(row, f"{name} is empty: it must name the owner of the row")
        if isinstance(cell, float) and abs(cell) >= LARGEST_EXACT:
            raise CellError(row, f"{name} has too many digits for a number: describe [columns]")
    if owners.dtype.kind in "iu":
        return owners
    try:
        return np.asarray(person_keys(cells, ids))
    except OtherSpelling as error:
        raise CellError(error.row, f"{name}: {error}") from error


def same_names(owners: Array) -> Array:
    """Owners as text, equal for spellings that may be the same person's in tables that were read
    with other types: 007 in a column of numbers is 7.

    >>> same_names(np.array(["007", "A7"])).tolist(), same_names(np.array([7, 12])).tolist()
    (['7', 'a7'], ['7', '12'])
    """
    return np.asarray([folded_key(person_key(owner)) for owner in owners.tolist()])


def numbers_in(column: Any, name: str) -> Array:
    """The numbers of a column, none of them empty."""
    with suppress(TypeError, ValueError):
        quick = np.asarray(column.to_numpy(), np.float64)
        if np.isfinite(quick).all():
            return quick
    for row, cell in enumerate(column.to_pylist()):
        with suppress(TypeError, ValueError):
            if math.isfinite(float(cell)):
                continue
        if is_empty(cell):
            wrong = "is empty: fill it with a public constant"
        else:
            wrong = "is not a number: make it one"
        raise CellError(row, f"{name} {wrong}, or describe it under [columns] in data.toml")
    raise FolderError(f"the column {name} has no numbers")


def numbered(targets: Array, name: str, description: DataDescription) -> Array:
    """Classes as numbers; words by their positions in `classes`."""
    if not description.classes:
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
    if targets.dtype == object and description.columns:  # cells as they are written
        for row, cell in enumerate(targets):
            if is_empty(cell):
                raise CellError(row, f"{name} is empty: leave the row out, or fill it")
        targets = np.asarray([str(cell).replace(description.decimal, ".") for cell in targets])
    try:
        return np.asarray(targets, np.float64)
    except ValueError as error:
        raise FolderError(
            f"{description.file}: targets must be numbers, or words listed in classes"
        ) from error
