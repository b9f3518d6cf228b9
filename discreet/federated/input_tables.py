"""Inputs for a saved model from CSV and NPZ files; what does not fit is said with its row and its column."""

from __future__ import annotations

import csv
import math
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from discreet.federated.predictions import SavedModel
from discreet.tasks.datasets import scale_breast_cancer
from discreet.tasks.examples import TaskShape
from discreet.tasks.folder import SCALE, FolderError, read_more

TARGET = "target"
_NAMES_SHOWN = 5

Array = np.ndarray[Any, Any]


class TableError(ValueError):
    """A file can't be read as inputs of a model. The message names the file and what is wrong in it."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """Inputs (n, *input_shape) as the model reads them, and their targets (n,) where the file has them."""

    inputs: Tensor
    targets: Tensor | None


def read_inputs(path: Path, saved: SavedModel) -> Inputs:
    """The inputs in a file, by its ending.

    .csv: a header and a row an input. For breast_cancer the columns are the 30 raw features by their names in
    scikit-learn, in any order; for other data as many columns as an input has numbers, in their order. A column
    `target` with class numbers may be there.
    .npz: an array `inputs` (n, *input_shape), for breast_cancer of raw features; `targets` (n,) may be there. Bytes are
    pixels, divided by 255.
    With data.name=folder the names, classes and ranges of the folder's data.toml hold, and .parquet is read too.

    Raises:
      TableError: the file is missing or of another kind, columns are missing, unknown or too many, a value is missing,
        not a number, not finite or out of the model's range, or a shape does not fit.
    """
    if saved.folder is not None:
        return _read_as_described(path, saved, saved.folder)
    readers = {".csv": _read_csv, ".npz": _read_npz}
    if path.suffix.lower() not in readers:
        raise TableError(f"{path}: a file of inputs ends in {' or '.join(readers)}")
    if not path.is_file():
        raise TableError(f"{path} does not exist")
    values, targets = readers[path.suffix.lower()](path, saved)
    return Inputs(_to_model(path, values, saved), None if targets is None else _to_classes(path, targets, saved))


def _read_as_described(path: Path, saved: SavedModel, folder: Path) -> Inputs:
    shape = TaskShape(saved.input_shape, saved.num_classes, SCALE)
    try:
        return Inputs(*read_more(folder, path, shape=shape))
    except FolderError as error:
        raise TableError(str(error)) from error


def feature_names(data: str) -> tuple[str, ...] | None:
    """The names of the columns of a data set that has names for them, or None."""
    if data != "breast_cancer":
        return None
    from sklearn.datasets import load_breast_cancer

    return tuple(str(name) for name in load_breast_cancer().feature_names)


def _read_csv(path: Path, saved: SavedModel) -> tuple[Array, Array | None]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        try:
            header = [name.strip() for name in next(reader, [])]
            rows = list(reader)
        except (csv.Error, UnicodeDecodeError) as error:
            raise TableError(f"{path} is not a CSV file: {error}") from error
    columns = _columns(path, header, saved)
    table = np.array(list(_numbers(path, header, rows)), dtype=np.float64).reshape(-1, len(header))
    targets = table[:, header.index(TARGET)] if TARGET in header else None
    return table[:, columns].reshape(-1, *saved.input_shape), targets


def _columns(path: Path, header: Sequence[str], saved: SavedModel) -> list[int]:
    """Where the inputs' numbers stand in a row."""
    given = [name for name in header if name != TARGET]
    if not given:
        raise TableError(f"{path} is empty: the first line names the columns")
    if len(set(header)) < len(header):
        raise TableError(f"{path}: the column {next(n for n in header if header.count(n) > 1)!r} is there twice")
    names = feature_names(saved.data)
    if names is None:
        expected = math.prod(saved.input_shape)
        if len(given) != expected:
            raise TableError(
                f"{path} has {len(given)} columns besides {TARGET}; {saved.data} has {expected} numbers an input, "
                f"of shape {saved.input_shape}"
            )
        return [header.index(name) for name in given]
    missing, unknown = [name for name in names if name not in given], [name for name in given if name not in names]
    if missing or unknown:
        faults = [
            f"{what} columns: {_some(found)}" for what, found in (("missing", missing), ("unknown", unknown)) if found
        ]
        raise TableError(f"{path} does not have the columns of {saved.data}; {'; '.join(faults)}")
    return [header.index(name) for name in names]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


def _numbers(path: Path, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[list[float]]:
    for line, row in enumerate(rows, start=2):
        if not row:
            continue
        if len(row) != len(header):
            raise TableError(f"{path}, line {line}: {len(row)} values for {len(header)} columns")
        yield [_number(path, line, name, text) for name, text in zip(header, row, strict=True)]


def _number(path: Path, line: int, column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        word = "is missing" if not text.strip() else f"is not a number: {text!r}"
        raise TableError(f"{path}, line {line}: the value of {column!r} {word}") from None
    if not math.isfinite(value):
        raise TableError(f"{path}, line {line}: the value of {column!r} is missing or not finite: {text}")
    return value


def _read_npz(path: Path, saved: SavedModel) -> tuple[Array, Array | None]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (zipfile.BadZipFile, ValueError, EOFError, AttributeError) as error:
        raise TableError(f"{path} is not an NPZ file of numbers: {error}") from error
    if "inputs" not in arrays:
        raise TableError(f"{path} has no array 'inputs'; it has {', '.join(arrays) or 'none'}")
    values, targets = arrays["inputs"], arrays.get("targets")
    if values.shape[1:] != saved.input_shape:
        wanted = ", ".join(map(str, ("n", *saved.input_shape)))
        raise TableError(f"{path}: inputs have shape {values.shape}, the model reads ({wanted})")
    if values.dtype.kind not in "fiu":
        raise TableError(f"{path}: inputs must be numbers, not {values.dtype}")
    if not np.isfinite(values).all():
        row = int(np.argwhere(~np.isfinite(values))[0][0])
        raise TableError(f"{path}: inputs[{row}] has a value that is missing or not finite")
    if targets is not None and targets.shape != (len(values),):
        raise TableError(f"{path}: targets have shape {targets.shape}, not ({len(values)},)")
    return values / 255.0 if values.dtype == np.uint8 and len(saved.input_shape) == 3 else values, targets


def _to_model(path: Path, values: Array, saved: SavedModel) -> Tensor:
    """The values as the model was trained on them."""
    if saved.data == "breast_cancer":
        return torch.from_numpy(scale_breast_cancer(values)).float()
    if saved.name == "lstm":
        return _whole(path, "inputs", values, saved.num_classes)
    if len(saved.input_shape) == 3 and values.size and not (values.min() >= 0 and values.max() <= 1):
        raise TableError(
            f"{path}: images of {saved.data} have values in [0, 1], not in [{values.min():g}, {values.max():g}]: "
            "divide them by the largest possible one"
        )
    return torch.from_numpy(np.array(values, dtype=np.float32))


def _to_classes(path: Path, targets: Array, saved: SavedModel) -> Tensor:
    return _whole(path, "targets", targets, saved.num_classes)


def _whole(path: Path, what: str, values: Array, bound: int) -> Tensor:
    if values.dtype.kind not in "fiu" or not ((values >= 0) & (values < bound) & (values == np.floor(values))).all():
        raise TableError(f"{path}: {what} must be whole numbers in [0, {bound})")
    return torch.from_numpy(values.astype(np.int64))
