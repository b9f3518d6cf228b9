"""A saved model, the inputs in a file as it reads them, its predictions, and how good they are."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from discreet.client_settings import FLOWER_APP
from discreet.config import ConfigError
from discreet.federated.run_folder import RunFolder, replace_file
from discreet.tasks.datasets import load_task, scale_breast_cancer
from discreet.tasks.examples import Examples, TaskShape
from discreet.tasks.folder import (
    FOLDER,
    SCALE,
    FolderError,
    classes_of,
    open_table,
    read_description,
    read_more,
    stack_columns,
)
from discreet.tasks.metrics import indicators
from discreet.tasks.models import build_model

MODEL_FILE, PREDICTIONS_FILE, INDICATORS_FILE = "model.safetensors", "predictions.csv", "indicators.json"
BATCH = 1024
TARGET = "target"
NAMES_SHOWN = 5  # of columns in a message

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class SavedModel:
    """A model as a run has left it.

    Attributes:
      model: with its parameters, in evaluation mode.
      name: of the architecture.
      data: the name of the data set it was trained on.
      input_shape: of one input, without the batch.
      num_classes: how many probabilities it gives.
      folder: where the data are described, with data.name=folder.
    """

    model: nn.Module
    name: str
    data: str
    input_shape: tuple[int, ...]
    num_classes: int
    folder: Path | None = None


def load_model(run: Path) -> SavedModel:
    """The model in a run folder.

    Raises:
      ConfigError: there is none, it is damaged, or this version can't build it.
    """
    path = run / MODEL_FILE
    if not path.is_file():
        raise ConfigError(f"{path} is missing: a run writes it when it ends")
    try:
        tensors = load_file(path)
        with safe_open(path, framework="pt") as file:
            facts = file.metadata()
        if facts["model"] == FLOWER_APP:
            raise ConfigError("it holds the arrays of another Flower app, whose own code predicts with them")
        shape, num_classes = tuple(json.loads(facts["input_shape"])), int(facts["num_classes"])
        model = build_model(facts["model"], shape, num_classes, seed=0)
        known = dict(model.named_parameters())  # without copies of tied ones, which are saved once
        if known.keys() != tensors.keys():
            raise ConfigError(f"{path} does not fit the model {facts['model']}")
        with torch.no_grad():
            for name, parameter in known.items():
                parameter.copy_(tensors[name])
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    folder = RunFolder(run).read_config().data.path if facts["data"] == FOLDER else None
    described = None if folder is None else Path(folder).expanduser().resolve()
    return SavedModel(model.eval(), facts["model"], facts["data"], shape, num_classes, described)


@dataclass(frozen=True, eq=False)
class Inputs:
    """Inputs (n, *input_shape) as the model reads them, and their targets (n,) if the file has them."""

    inputs: Tensor
    targets: Tensor | None


def read_inputs(path: Path, saved: SavedModel, *, id_column: str | None = None) -> Inputs:
    """The inputs in a file, by its ending. A column `id_column` is none of the inputs.

    .csv, .parquet: a row an input. For breast_cancer the columns are the 30 raw features by their names in
    scikit-learn, in any order; for other data as many columns as an input has numbers, in their order. A column
    `target` with class numbers may be there.
    .npz: an array `inputs` (n, *input_shape), for breast_cancer of raw features; `targets` (n,) may be there. Bytes are
    pixels, divided by 255.
    With data.name=folder the names, classes and ranges of the folder's data.toml hold.

    Raises:
      FolderError: the file is missing or of another kind, columns are missing, unknown or too many, a value is missing,
        not a number, not finite or out of the model's range, or a shape does not fit.
    """
    if saved.folder is not None:
        return Inputs(*read_more(saved.folder, path, shape=TaskShape(saved.input_shape, saved.num_classes, SCALE)))
    kind = path.suffix.lower().removeprefix(".")
    if kind not in ("csv", "parquet", "npz"):
        raise FolderError(f"{path}: a file of inputs ends in .csv, .parquet or .npz")
    if not path.is_file():
        raise FolderError(f"{path} does not exist")
    found = open_table(path, kind)
    if kind == "npz":
        values, targets = _array(path, found, saved), found.get("targets")
    else:
        names = _columns(path, [name for name in found if name not in (TARGET, id_column)], saved)
        values, targets = stack_columns(found, names, path).reshape(-1, *saved.input_shape), _targets(path, found)
    if targets is not None and len(targets) != len(values):
        raise FolderError(f"{path} has {len(values)} inputs and {len(targets)} targets")
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
            raise FolderError(
                f"{path} has {len(given)} columns besides {TARGET}; {saved.data} has {expected} numbers an input, "
                f"of shape {saved.input_shape}"
            )
        return given
    missing, unknown = [name for name in names if name not in given], [name for name in given if name not in names]
    if missing or unknown:
        faults = [
            f"{what} columns: {_some(found)}" for what, found in (("missing", missing), ("unknown", unknown)) if found
        ]
        raise FolderError(f"{path} does not have the columns of {saved.data}; {'; '.join(faults)}")
    return names


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


def _targets(path: Path, found: dict[str, Any]) -> Array | None:
    return stack_columns(found, [TARGET], path)[:, 0] if TARGET in found else None


def _array(path: Path, found: dict[str, Array], saved: SavedModel) -> Array:
    if "inputs" not in found:
        raise FolderError(f"{path} has no array 'inputs'; it has {', '.join(found) or 'none'}")
    values = found["inputs"]
    if values.shape[1:] != saved.input_shape:
        wanted = ", ".join(map(str, ("n", *saved.input_shape)))
        raise FolderError(f"{path}: inputs have shape {values.shape}, the model reads ({wanted})")
    if values.dtype.kind not in "fiu":
        raise FolderError(f"{path}: inputs must be numbers, not {values.dtype}")
    if not np.isfinite(values).all():
        row = int(np.argwhere(~np.isfinite(values))[0][0])
        raise FolderError(f"{path}: inputs[{row}] has a value that is missing or not finite")
    return values / 255.0 if values.dtype == np.uint8 and len(saved.input_shape) == 3 else values


def _to_model(path: Path, values: Array, saved: SavedModel) -> Tensor:
    """The values as the model was trained on them."""
    if saved.data == "breast_cancer":
        return torch.from_numpy(scale_breast_cancer(values)).float()
    if saved.name == "lstm":
        if not ((values >= 0) & (values < saved.num_classes) & (values == np.floor(values))).all():
            raise FolderError(f"{path}: inputs must be whole numbers in [0, {saved.num_classes})")
        return torch.from_numpy(values.astype(np.int64))
    if len(saved.input_shape) == 3 and values.size and not (values.min() >= 0 and values.max() <= 1):
        raise FolderError(
            f"{path}: images of {saved.data} have values in [0, 1], not in [{values.min():g}, {values.max():g}]: "
            "divide them by the largest possible one"
        )
    return torch.from_numpy(np.array(values, dtype=np.float32))


@torch.no_grad()
def predict(saved: SavedModel, inputs: Tensor) -> Tensor:
    """Probabilities (n, num_classes), float64, of inputs (n, *input_shape); n may be 0.

    Raises:
      ValueError: inputs of another shape.
    """
    if tuple(inputs.shape[1:]) != saved.input_shape:
        raise ValueError(f"the model reads inputs of shape {saved.input_shape}, not {tuple(inputs.shape[1:])}")
    parts = [saved.model(part).double().softmax(dim=1) for part in torch.split(inputs, BATCH) if len(part)]
    return torch.cat([torch.empty(0, saved.num_classes, dtype=torch.float64), *parts])


def class_names(saved: SavedModel) -> tuple[str, ...]:
    """The classes by their names in the folder's data.toml, or by their numbers if they have no names."""
    named = read_description(saved.folder).classes if saved.folder is not None else ()
    return named or tuple(map(str, range(saved.num_classes)))


def predictions_csv(
    probabilities: Tensor,
    targets: Tensor | None = None,
    *,
    classes: Sequence[str] | None = None,
    ids: tuple[str, Sequence[object]] | None = None,
) -> str:
    """A line for each input: its row from 0, its target where known, the likeliest class, the probability of each.

    Args:
      classes: the names of the classes; their numbers by default.
      ids: the name of a column that tells the rows apart, and its value in each.
    """
    classes = classes if classes is not None else tuple(map(str, range(probabilities.shape[1])))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    known = ["target"] if targets is not None else []
    told = [ids[0]] if ids is not None else []
    writer.writerow(["row", *told, *known, "prediction", *(f"probability_{name}" for name in classes)])
    for row, chances in enumerate(probabilities):
        told = [str(ids[1][row])] if ids is not None else []
        target = [classes[int(targets[row])]] if targets is not None else []
        said = classes[int(chances.argmax())]
        writer.writerow([row, *told, *target, said, *(f"{float(chance):.6g}" for chance in chances)])
    return text.getvalue()


def indicators_of(probabilities: Tensor, targets: Tensor) -> dict[str, float | None]:
    """How right probabilities (n, classes) are about targets (n,); n at least 1. None for what has no value.

    Two classes: accuracy, auc, ks, precision, recall, f1, loss, see `discreet.tasks.metrics.indicators`. More:
    accuracy, loss, and precision, recall and f1 as the mean over classes.
    """
    if probabilities.shape[1] == 2:
        found = indicators(targets, probabilities[:, 1])
    else:
        found = _of_many_classes(probabilities, targets)
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


def _of_many_classes(probabilities: Tensor, targets: Tensor) -> dict[str, float]:
    from sklearn import metrics

    truth, said = targets.numpy(), probabilities.argmax(dim=1).numpy()
    precision, recall, f1, _ = metrics.precision_recall_fscore_support(truth, said, average="macro", zero_division=0.0)
    chances = probabilities[torch.arange(len(targets)), targets].clamp_min(torch.finfo(torch.float64).tiny)
    return {
        "accuracy": float(metrics.accuracy_score(truth, said)),
        "precision": float(precision),
        "recall": float(recall),
        "f1": float(f1),
        "loss": float(-chances.log().mean()),
    }


NOTES = {
    "test": "on the public test set: says nothing of the clients' data that the model does not say",
    "train": "NOT PRIVATE: computed from the clients' own examples without noise, and covered by no epsilon. "
    "For simulations; do not publish",
}


def write_indicators(run: Path, *, train: bool = False) -> Path:
    """`indicators.json` in a run folder: of the public test set, and with `train` of all training examples too.

    The ones on training data are not private, and the file says so: in a simulation alone somebody holds all of it.

    Raises:
      ConfigError: the run or its data can't be read.
    """
    saved = load_model(run)
    parts = {"test": own_test_set(run)} | ({"train": _own_training_set(run)} if train else {})
    found = {
        part: {"note": NOTES[part], **indicators_of(predict(saved, table.inputs), table.targets)}
        for part, table in parts.items()
    }
    replace_file(run / INDICATORS_FILE, (json.dumps(found, indent=2) + "\n").encode())
    return run / INDICATORS_FILE


def write_predictions(run: Path) -> Path:
    """`predictions.csv` in a run folder, for the public test set.

    Raises:
      ConfigError: the run or its data can't be read.
    """
    saved, table = load_model(run), own_test_set(run)
    text = predictions_csv(predict(saved, table.inputs), table.targets, classes=class_names(saved))
    replace_file(run / PREDICTIONS_FILE, text.encode())
    return run / PREDICTIONS_FILE


def own_test_set(run: Path) -> Examples:
    """The public test set of a run's data.

    Raises:
      ConfigError: the run's configuration or its data can't be read.
    """
    return _task_tables(run)[1]


def _own_training_set(run: Path) -> Examples:
    return _task_tables(run)[0]


def _task_tables(run: Path) -> tuple[Examples, Examples]:
    data = RunFolder(run).read_config().data
    try:
        task = load_task(data.name, path=data.path)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    return task.train, task.test
