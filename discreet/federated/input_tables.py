"""Inputs for a saved model from files; what does not fit is said with its row and its column."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from discreet.federated.predictions import SavedModel
from discreet.tasks.datasets import scale_breast_cancer
from discreet.tasks.examples import TaskShape
from discreet.tasks.folder import SCALE, FolderError, classes_of, open_table, read_more, stack_columns

TARGET = "target"
_NAMES_SHOWN = 5

Array = np.ndarray[Any, Any]
TableError = FolderError  # a file can't be read as inputs of a model


@dataclass(frozen=True, eq=False)
class Inputs:
    """Inputs (n, *input_shape) as the model reads them, and their targets (n,) if the file has them."""

    inputs: Tensor
    targets: Tensor | None


def read_inputs(path: Path, saved: SavedModel) -> Inputs:
    """The inputs in a file, by its ending.

    .csv, .parquet: a row an input. For breast_cancer the columns are the 30 raw features by their names in
    scikit-learn, in any order; for other data as many columns as an input has numbers, in their order. A column
    `target` with class numbers may be there.
    .npz: an array `inputs` (n, *input_shape), for breast_cancer of raw features; `targets` (n,) may be there. Bytes are
    pixels, divided by 255.
    With data.name=folder the names, classes and ranges of the folder's data.toml hold.

    Raises:
      TableError: the file is missing or of another kind, columns are missing, unknown or too many, a value is missing,
        not a number, not finite or out of the model's range, or a shape does not fit.
    """
    if saved.folder is not None:
        return Inputs(*read_more(saved.folder, path, shape=TaskShape(saved.input_shape, saved.num_classes, SCALE)))
    kind = path.suffix.lower().removeprefix(".")
    if kind not in ("csv", "parquet", "npz"):
        raise TableError(f"{path}: a file of inputs ends in .csv, .parquet or .npz")
    if not path.is_file():
        raise TableError(f"{path} does not exist")
    found = open_table(path, kind)
    if kind == "npz":
        values, targets = _array(path, found, saved), found.get("targets")
    else:
        names = _columns(path, [name for name in found if name != TARGET], saved)
        values, targets = stack_columns(found, names, path).reshape(-1, *saved.input_shape), _targets(path, found)
    if targets is not None and len(targets) != len(values):
        raise TableError(f"{path} has {len(values)} inputs and {len(targets)} targets")
    classes = None if targets is None else classes_of(targets, saved.num_classes, str(path))
    return Inputs(_to_model(path, values, saved), classes)


def feature_names(data: str) -> tuple[str, ...] | None:
    """The names of the columns of a data set that has names for them, or None."""
    if data != "breast_cancer":
        return None
    from sklearn.datasets import load_breast_cancer

    return tuple(str(name) for name in load_breast_cancer().feature_names)


def _columns(path: Path, given: Sequence[str], saved: SavedModel) -> Sequence[str]:
    """The columns of the inputs in their order."""
    names, expected = feature_names(saved.data), math.prod(saved.input_shape)
    if names is None:
        if len(given) != expected:
            raise TableError(
                f"{path} has {len(given)} columns besides {TARGET}; {saved.data} has {expected} numbers an input, "
                f"of shape {saved.input_shape}"
            )
        return given
    missing, unknown = [name for name in names if name not in given], [name for name in given if name not in names]
    if missing or unknown:
        faults = [
            f"{what} columns: {_some(found)}" for what, found in (("missing", missing), ("unknown", unknown)) if found
        ]
        raise TableError(f"{path} does not have the columns of {saved.data}; {'; '.join(faults)}")
    return names


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


def _targets(path: Path, found: dict[str, Any]) -> Array | None:
    return stack_columns(found, [TARGET], path)[:, 0] if TARGET in found else None


def _array(path: Path, found: dict[str, Array], saved: SavedModel) -> Array:
    if "inputs" not in found:
        raise TableError(f"{path} has no array 'inputs'; it has {', '.join(found) or 'none'}")
    values = found["inputs"]
    if values.shape[1:] != saved.input_shape:
        wanted = ", ".join(map(str, ("n", *saved.input_shape)))
        raise TableError(f"{path}: inputs have shape {values.shape}, the model reads ({wanted})")
    if values.dtype.kind not in "fiu":
        raise TableError(f"{path}: inputs must be numbers, not {values.dtype}")
    if not np.isfinite(values).all():
        row = int(np.argwhere(~np.isfinite(values))[0][0])
        raise TableError(f"{path}: inputs[{row}] has a value that is missing or not finite")
    return values / 255.0 if values.dtype == np.uint8 and len(saved.input_shape) == 3 else values


def _to_model(path: Path, values: Array, saved: SavedModel) -> Tensor:
    """The values as the model was trained on them."""
    if saved.data == "breast_cancer":
        return torch.from_numpy(scale_breast_cancer(values)).float()
    if saved.name == "lstm":
        if not ((values >= 0) & (values < saved.num_classes) & (values == np.floor(values))).all():
            raise TableError(f"{path}: inputs must be whole numbers in [0, {saved.num_classes})")
        return torch.from_numpy(values.astype(np.int64))
    if len(saved.input_shape) == 3 and values.size and not (values.min() >= 0 and values.max() <= 1):
        raise TableError(
            f"{path}: images of {saved.data} have values in [0, 1], not in [{values.min():g}, {values.max():g}]: "
            "divide them by the largest possible one"
        )
    return torch.from_numpy(np.array(values, dtype=np.float32))
