"""A node's own data: a folder with a table and a small description, checked against the task before anything is sent.

`data.toml` in the folder says what is where:

    format = "csv"                  # csv, parquet, npz, idx
    file = "train.csv"              # for idx: the file of the inputs
    target = "label"                # the column or array of the classes; for idx: the file of the labels
    inputs = ["p0", "p1"]           # columns in their order, or the name of an array; left out: all others, or "inputs"
    low = 0                         # public ranges, one for all inputs or one for each: low..high becomes what the
    high = 16                       # task's inputs lie in, 0..1 or -1..1
    classes = ["benign", "malign"]  # where classes are words: their numbers are their places in this list
    task = "digits"                 # left out: any task that they fit

A range is a constant that is known without looking at the data: a mean or a minimum of it would be a release without an
account. What is wrong is said to the owner of the node, in full; the server only learns that the data do not fit.
"""

from __future__ import annotations

import argparse
import difflib
import math
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from discreet.tasks.examples import Examples
from discreet.tasks.idx import read_idx

Array = np.ndarray[Any, Any]

DESCRIPTION = "data.toml"


class NodeDataError(ValueError):
    """A node's data are missing, can't be read, or do not fit the task. For the owner's eyes."""


@dataclass(frozen=True)
class TaskShape:
    """What a task expects of an example.

    Attributes:
      input_shape, num_classes: as in `discreet.tasks.examples.Task`.
      scale: what inputs lie in, where they are numbers.
      tokens: inputs are whole numbers in [0, num_classes), as in text.
    """

    input_shape: tuple[int, ...]
    num_classes: int
    scale: tuple[float, float] = (0.0, 1.0)
    tokens: bool = False


# Known without loading the demonstration data, which a node with its own does not have.
SHAPES = {
    "digits": TaskShape((1, 8, 8), 10),
    "breast_cancer": TaskShape((30,), 2, scale=(-1.0, 1.0)),
    "mnist": TaskShape((1, 28, 28), 10),
    "fashion_mnist": TaskShape((1, 28, 28), 10),
    "cifar10": TaskShape((3, 32, 32), 10),
    "femnist": TaskShape((1, 28, 28), 62),
    "shakespeare": TaskShape((80,), 98, tokens=True),
}


@dataclass(frozen=True)
class DataDescription:
    """What `data.toml` says: see the head of this file."""

    format: str
    file: str
    target: str
    inputs: str | tuple[str, ...] | None = None
    low: float | tuple[float, ...] | None = None
    high: float | tuple[float, ...] | None = None
    classes: tuple[str, ...] = ()
    task: str | None = None

    def __post_init__(self) -> None:
        if self.format not in READERS:
            raise NodeDataError(f"format must be one of {', '.join(READERS)} (got {self.format!r})")
        if (self.low is None) != (self.high is None):
            raise NodeDataError("low and high must be given together")
        if self.low is not None and not np.all(np.asarray(self.high, float) > np.asarray(self.low, float)):
            raise NodeDataError(f"high must be above low (got {self.high} and {self.low})")
        if any(not isinstance(name, str) for name in self.classes):
            raise NodeDataError("classes must be a list of texts; classes that are numbers need none")


def load_node_data(folder: Path, task: str) -> Examples:
    """The examples in a node's own folder, for a task of `SHAPES`. Read once per process.

    Raises:
      NodeDataError: what is wrong, with the file, the row or the class.
    """
    return _load(folder.expanduser().resolve(), task)


@lru_cache(maxsize=4)
def _load(folder: Path, task: str) -> Examples:
    if task not in SHAPES:
        raise NodeDataError(f"no task {task!r}; data of a node's own can be given for {', '.join(sorted(SHAPES))}")
    shape, description = SHAPES[task], read_description(folder)
    path = _file(folder, description.file)
    if description.task not in (None, task):
        raise NodeDataError(f"{folder / DESCRIPTION} gives these data for {description.task}, not for {task}")
    try:
        inputs, targets = READERS[description.format](folder, description)
    except (OSError, ValueError) as error:
        raise error if isinstance(error, NodeDataError) else NodeDataError(f"{path} can't be read: {error}") from error
    if len(inputs) != len(targets):
        raise NodeDataError(f"{path} has {len(inputs)} rows of inputs and {len(targets)} targets")
    return Examples(_inputs(inputs, description, shape, f"{path} and the task {task}"), _targets(targets, shape, path))


def read_description(folder: Path) -> DataDescription:
    """`data.toml` of a folder.

    Raises:
      NodeDataError: it is missing, is not TOML, or has a key that is unknown, missing, or of the wrong kind.
    """
    path = folder / DESCRIPTION
    try:
        settings = tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise NodeDataError(f"{path} is missing: it says in which file the data are, and in which form") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise NodeDataError(f"{path} is not TOML: {error}") from error
    known = [field.name for field in fields(DataDescription)]
    for key in settings:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            raise NodeDataError(f"{path} has an unknown key {key}" + (f"; did you mean {close[0]}?" if close else ""))
    missing = [key for key in ("format", "file", "target") if not isinstance(settings.get(key), str)]
    if missing:
        raise NodeDataError(f"{path} must give {missing[0]} as a text")
    try:
        values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in settings.items()}
        return DataDescription(**values)
    except (NodeDataError, TypeError, ValueError) as error:
        raise NodeDataError(f"{path}: {error}") from error


def _inputs(values: Array, description: DataDescription, shape: TaskShape, what: str) -> torch.Tensor:
    size, found = math.prod(shape.input_shape), math.prod(values.shape[1:])
    if found != size:
        raise NodeDataError(f"{what} do not fit: {found} inputs a row, not {size} for the shape {shape.input_shape}")
    if shape.tokens:
        whole = np.asarray(values, np.int64)
        if not np.array_equal(whole, values) or (
            whole.size and not 0 <= whole.min() <= whole.max() < shape.num_classes
        ):
            raise NodeDataError(f"{what} do not fit: inputs must be whole numbers in [0, {shape.num_classes})")
        return torch.from_numpy(whole.reshape(-1, *shape.input_shape))
    numbers = np.asarray(values, np.float64).reshape(len(values), size)
    wrong = np.flatnonzero(~np.isfinite(numbers).all(axis=1))
    if len(wrong):
        raise NodeDataError(f"{what} do not fit: an input of row {wrong[0]} is missing, NaN or infinite")
    scaled = _scale(numbers, description, shape)
    return torch.from_numpy(scaled.astype(np.float32).reshape(-1, *shape.input_shape))


def _scale(numbers: Array, description: DataDescription, shape: TaskShape) -> Array:
    if description.low is None:
        return numbers
    low, high = (np.asarray(bound, np.float64) for bound in (description.low, description.high))
    for bound in (low, high):
        if bound.ndim > 1 or bound.size not in (1, numbers.shape[1]):
            raise NodeDataError(f"low and high must be one number or {numbers.shape[1]} of them")
    # Clamped: a value outside the public range must not tell how far outside it is.
    share = np.clip((numbers - low) / (high - low), 0.0, 1.0)
    return np.asarray(shape.scale[0] + share * (shape.scale[1] - shape.scale[0]))


def _targets(values: Array, shape: TaskShape, path: Path) -> torch.Tensor:
    if values.ndim != 1:
        raise NodeDataError(f"{path}: targets must be one number a row, not an array of shape {values.shape}")
    whole = np.asarray(values).astype(np.int64)
    outside = np.flatnonzero((whole != values) | (whole < 0) | (whole >= shape.num_classes))
    if len(outside):
        row = int(outside[0])
        raise NodeDataError(f"{path}: the class in row {row} is {values[row]}, not one of 0 to {shape.num_classes - 1}")
    return torch.from_numpy(whole)


def _file(folder: Path, name: str) -> Path:
    path = folder / name
    if path.resolve().parent != folder.resolve():
        raise NodeDataError(f"{name} must lie in {folder} itself")
    if not path.is_file():
        raise NodeDataError(f"{path} is missing")
    return path


def _read_csv(folder: Path, description: DataDescription) -> tuple[Array, Array]:
    from pyarrow import csv  # type: ignore[import-untyped]

    return _columns(csv.read_csv(_file(folder, description.file)), description)


def _read_parquet(folder: Path, description: DataDescription) -> tuple[Array, Array]:
    from pyarrow import parquet

    return _columns(parquet.read_table(_file(folder, description.file)), description)


def _columns(table: Any, description: DataDescription) -> tuple[Array, Array]:
    there: list[str] = table.column_names
    given = (description.inputs,) if isinstance(description.inputs, str) else description.inputs
    names = list(given) if given is not None else [name for name in there if name != description.target]
    for name in (description.target, *names):
        if name not in there:
            raise NodeDataError(f"{description.file} has no column {name}")
    try:
        parts = [np.asarray(table.column(name).to_numpy(), np.float64) for name in names]
    except ValueError as error:
        raise NodeDataError(f"a column of inputs in {description.file} does not hold numbers: {error}") from error
    inputs = np.stack(parts, axis=1) if parts else np.zeros((table.num_rows, 0))
    return inputs, _numbered(table.column(description.target).to_numpy(), description)


def _read_npz(folder: Path, description: DataDescription) -> tuple[Array, Array]:
    name = description.inputs if description.inputs is not None else "inputs"
    if not isinstance(name, str):
        raise NodeDataError("inputs must be the name of one array in an npz file")
    with np.load(_file(folder, description.file), allow_pickle=False) as arrays:
        for wanted in (name, description.target):
            if wanted not in arrays:
                raise NodeDataError(f"{description.file} has no array {wanted}")
        return arrays[name], _numbered(arrays[description.target], description)


def _read_idx(folder: Path, description: DataDescription) -> tuple[Array, Array]:
    labels = read_idx(_file(folder, description.target))
    return read_idx(_file(folder, description.file)), _numbered(labels, description)


def _numbered(targets: Array, description: DataDescription) -> Array:
    """Classes as numbers; words by their places in `classes`."""
    if description.classes:
        places = {name: place for place, name in enumerate(description.classes)}
        unknown = [str(value) for value in targets if str(value) not in places]
        if unknown:
            raise NodeDataError(f"{description.file}: the class {unknown[0]} is not in classes")
        return np.asarray([places[str(value)] for value in targets], np.int64)
    try:
        return np.asarray(targets, np.float64)
    except ValueError as error:
        raise NodeDataError(f"{description.file}: classes that are words must be listed in classes") from error


READERS: Mapping[str, Callable[[Path, DataDescription], tuple[Array, Array]]] = {
    "csv": _read_csv,
    "parquet": _read_parquet,
    "npz": _read_npz,
    "idx": _read_idx,
}


def main(words: Sequence[str]) -> int:
    """Says whether a folder fits a task, and how many examples it holds."""
    parser = argparse.ArgumentParser(prog="python -m client_app.node_data", description="Checks a node's own data.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("task", help=", ".join(SHAPES))
    arguments = parser.parse_args(words)
    try:
        examples = load_node_data(arguments.folder, arguments.task)
    except NodeDataError as error:
        print(f"discreet: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.folder} fits {arguments.task}: {len(examples)} examples")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
