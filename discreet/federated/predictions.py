"""A saved model, the inputs in a file as it reads them, its predictions, and how good they are."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from discreet.federated.prediction_tables import indicators_of, predictions_csv
from discreet.federated.run_folder import RunFolder, replace_file
from discreet.settings.rules import ConfigError
from discreet.settings.training import FLOWER_APP
from discreet.tasks.datasets import BREAST_CANCER_RANGES, load_task
from discreet.tasks.description import read_description
from discreet.tasks.examples import Examples, TaskShape, to_unit_box
from discreet.tasks.folder import (
    FOLDER,
    SCALE,
    lines_of,
    open_table,
    read_more,
    stack_columns,
)
from discreet.tasks.models import model_for, parts_of
from discreet.tasks.normalising import Normaliser
from discreet.tasks.targets import CLASSES, LABELS, NUMBERS, SEQUENCES, FolderError, RowError, Target, targets_of

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
      shape: what it expects of an input, and what it predicts.
      folder: where the data are described, with data.name=folder.
      normaliser: what `predict` normalises inputs by.
    """

    model: nn.Module
    name: str
    data: str
    shape: TaskShape
    folder: Path | None = None
    normaliser: Normaliser = field(default_factory=Normaliser)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one input, without the batch."""
        return self.shape.input_shape

    @property
    def num_classes(self) -> int:
        """How many classes it tells apart; 0 if it predicts labels or numbers."""
        return self.shape.num_classes

    @property
    def target(self) -> Target:
        """What it predicts."""
        return self.shape.target


def named_parameters_of(model: nn.Module, vector: Tensor) -> dict[str, Tensor]:
    """Copies named and shaped like the model's parameters, tied ones once: `vector` cut into the trainable ones, and
    the frozen ones as they are in the model."""
    parts = iter(parts_of(model, vector))
    return {
        name: (next(parts) if value.requires_grad else value.detach()).clone(memory_format=torch.contiguous_format)
        for name, value in model.named_parameters()
    }


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
        shape = _shape_of(facts)
        model = model_for(facts["model"], shape, seed=0)
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
    by = {name: tuple(values) for name, values in json.loads(facts.get("normaliser", "{}")).items()}
    return SavedModel(model.eval(), facts["model"], facts["data"], shape, described, Normaliser(**by))


def _shape_of(facts: Mapping[str, str]) -> TaskShape:
    """What a model file says of its task; one that was written before there were other targets predicts classes."""
    found = json.loads(facts.get("target", "{}"))
    lists = {name: tuple(found.get(name, ())) for name in ("names", "low", "high")}
    target = Target(found.get("kind", CLASSES), **lists, length=found.get("length", 0))
    tokens = int(facts.get("num_tokens", 0))
    return TaskShape(tuple(json.loads(facts["input_shape"])), int(facts["num_classes"]), SCALE, tokens, target)


@dataclass(frozen=True, eq=False)
class Inputs:
    """Inputs (n, *input_shape) as the model reads them, and their targets, as examples have them, if they are there."""

    inputs: Tensor
    targets: Tensor | None


def read_inputs(path: Path, saved: SavedModel, *, id_column: str | None = None) -> Inputs:
    """The inputs in a file, by its ending. A column `id_column` is none of the inputs.

    .csv, .parquet: a row an input. For breast_cancer the columns are the 30 raw features by their names in
    scikit-learn, in any order; for other data as many columns as an input has numbers, in their order. A column
    `target` with class numbers may be there, or columns with the names of the labels or numbers.
    .npz: an array `inputs` (n, *input_shape), for breast_cancer of raw features; `targets` (n,) or (n, k) may be there.
    Bytes are pixels, divided by 255.
    With data.name=folder the names, classes and ranges of the folder's data.toml hold.

    Raises:
      FolderError: the file is missing or of another kind, columns are missing, unknown or too many, a value is missing,
        not a number, not finite or out of the model's range, or a shape does not fit.
    """
    if saved.folder is not None:
        return Inputs(*read_more(saved.folder, path, shape=saved.shape))
    kind = path.suffix.lower().removeprefix(".")
    if kind not in ("csv", "parquet", "npz"):
        raise FolderError(f"{path}: a file of inputs ends in .csv, .parquet or .npz")
    if not path.is_file():
        raise FolderError(f"{path} does not exist")
    found = open_table(path, kind)
    with lines_of(path, kind):
        if kind == "npz":
            values, targets = _array(path, found, saved), found.get("targets")
        else:
            told = (*_target_columns(saved), id_column)
            names = _columns(path, [name for name in found if name not in told], saved)
            values, targets = stack_columns(found, names).reshape(-1, *saved.input_shape), _targets(found, saved)
        if targets is not None and len(targets) != len(values):
            raise FolderError(f"{path} has {len(values)} inputs and {len(targets)} targets")
        if targets is not None:
            targets = targets_of(targets, saved.target, num_classes=saved.num_classes, what=str(path))
    return Inputs(_to_model(path, values, saved), targets)


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


def _target_columns(saved: SavedModel) -> tuple[str, ...]:
    return saved.target.names or (TARGET,)


def _targets(found: dict[str, Any], saved: SavedModel) -> Array | None:
    names = _target_columns(saved)
    if not all(name in found for name in names):
        return None
    columns = stack_columns(found, names)
    return columns[:, 0] if saved.target.kind == CLASSES else columns


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
        raise RowError(row, "an input is missing or not finite")
    return values / 255.0 if values.dtype == np.uint8 and len(saved.input_shape) == 3 else values


def _to_model(path: Path, values: Array, saved: SavedModel) -> Tensor:
    """The values as the model was trained on them."""
    if saved.data == "breast_cancer":
        return torch.from_numpy(to_unit_box(values, BREAST_CANCER_RANGES)).float()
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


_SAY: dict[str, Callable[[Target, Tensor], Tensor]] = {
    CLASSES: lambda _, outputs: outputs.softmax(dim=1),
    LABELS: lambda _, outputs: outputs.sigmoid(),
    NUMBERS: Target.in_units,
    SEQUENCES: lambda _, outputs: outputs.softmax(dim=1),
}


@torch.no_grad()
def predict(saved: SavedModel, inputs: Tensor) -> Tensor:
    """What a model says of inputs (n, *input_shape), (n, k), float64: the probabilities of classes or of labels, or
    numbers in their own units; of sequences the probabilities of classes at each position, (n, classes, length). n may
    be 0.

    Raises:
      ValueError: inputs of another shape.
    """
    if tuple(inputs.shape[1:]) != saved.input_shape:
        raise ValueError(f"the model reads inputs of shape {saved.input_shape}, not {tuple(inputs.shape[1:])}")
    say, read = _SAY[saved.target.kind], saved.normaliser.inputs
    parts = [say(saved.target, saved.model(read(part)).double()) for part in torch.split(inputs, BATCH) if len(part)]
    return torch.cat([torch.empty(0, *saved.shape.output_shape, dtype=torch.float64), *parts])


def class_names(saved: SavedModel) -> tuple[str, ...]:
    """The classes by their names in the folder's data.toml, or by their numbers if they have no names."""
    named = read_description(saved.folder).classes if saved.folder is not None else ()
    return named or tuple(map(str, range(saved.num_classes)))


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
        part: {"note": NOTES[part], **indicators_of(predict(saved, table.inputs), table.targets, saved.target)}
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
    said = predict(saved, table.inputs)
    text = predictions_csv(said, table.targets, classes=class_names(saved), target=saved.target)
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
