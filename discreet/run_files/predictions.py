"""A saved model, inputs from a file in the form that it reads, its predictions, and their
quality."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from discreet.data.datasets import BREAST_CANCER_RANGES, load_task
from discreet.data.description import DESCRIPTION, DataDescription, description_of, read_description
from discreet.data.examples import Task, TaskShape, normalised_inputs
from discreet.data.folder import SCALE, of_file, read_file, with_inputs
from discreet.data.targets import (
    CLASSES,
    LABELS,
    NUMBERS,
    SEQUENCES,
    SURVIVAL,
    Array,
    FolderError,
    Target,
)
from discreet.models.models import BATCH, model_for, parts_of
from discreet.per_example.objective import PADDING, cross_entropy, trainable
from discreet.queries.metrics import number_scores
from discreet.queries.survival import survived
from discreet.run_files.csv_text import csv_text
from discreet.run_files.indicators import class_indicators, label_indicators, survival_indicators
from discreet.run_files.model_description import read_facts
from discreet.run_files.run_folder import RunFolder
from discreet.run_files.whole_files import replace_file, write_json
from discreet.settings.data import FOLDER, NormaliserConfig
from discreet.settings.foreign_files import one_line
from discreet.settings.rules import ConfigError, read_json
from discreet.settings.training import FLOWER_APP, ModelConfig

MODEL_FILE = "model.safetensors"
PREDICTIONS_FILE = "predictions.csv"
INDICATORS_FILE = "indicators.json"


@dataclass(frozen=True, eq=False)
class SavedModel:
    """A model as a run saved it.

    Attributes:
      model: the module with its parameters, in evaluation mode.
      data: the name of the data set it was trained on.
      shape: the shape of its inputs, and its target.
      description: the description of the data, with data.name=folder, as it was when the run ended.
      normaliser: the normaliser that `predict` applies to inputs.
    """

    model: nn.Module
    data: str
    shape: TaskShape
    description: DataDescription | None = None
    normaliser: NormaliserConfig = field(default_factory=NormaliserConfig)


def named_parameters_of(model: nn.Module, vector: Tensor) -> dict[str, Tensor]:
    """Named copies with the shapes of the model's parameters, tied ones once: `vector` cut into the
    trainable ones, and the frozen ones as they are in the model."""
    parts = iter(parts_of(vector, trainable(model)))
    return {
        name: (next(parts) if value.requires_grad else value.detach()).clone(
            memory_format=torch.contiguous_format
        )
        for name, value in model.named_parameters()
    }


def load_model(run: Path) -> SavedModel:
    """The model in a run folder. ConfigError: there is none, it is damaged, or this version can't
    build it."""
    path = run / MODEL_FILE
    if not path.is_file():
        raise ConfigError(f"{path} is missing: a run writes it at the end")
    with one_line(path, ConfigError):
        tensors = load_file(path)
        with safe_open(path, framework="pt") as file:
            facts = file.metadata()
        if facts["model"] == FLOWER_APP:
            raise ConfigError(
                "it holds the arrays of another Flower app: predict with that app's own code"
            )
        data = facts["data"]
        shape = _shape_of(facts)
        named = ModelConfig(facts["model"])
        told = facts.get("model_settings")  # not of a run of before there were any
        model = model_for(read_json(ModelConfig, told) if told else named, shape, seed=0)
        known = dict(model.named_parameters())  # without copies of tied ones, which are saved once
        if known.keys() != tensors.keys():
            raise ConfigError(f"{path} does not fit the model {facts['model']}")
        with torch.no_grad():
            for name, parameter in known.items():
                parameter.copy_(tensors[name])
        listed = json.loads(facts.get("normaliser", "{}"))
        by = NormaliserConfig(**{name: values or None for name, values in listed.items()})
    return SavedModel(model.eval(), data, shape, _described(run, data), by)


def _described(run: Path, data: str) -> DataDescription | None:
    """The description in model.json, or the current data.toml for a run of an older version."""
    facts = read_facts(run)
    if facts is not None:
        if facts["description"] is None:
            return None
        return description_of(facts["description"])
    if data == FOLDER:
        return described_today(run)
    return None


def described_today(run: Path) -> DataDescription | None:
    """The current data.toml of a run's data; None if there is none any more. FolderError: it is
    invalid."""
    path = RunFolder(run).read_config().data.path
    if path is None:
        folder = None
    else:
        folder = Path(path).expanduser().resolve()
    if folder is None or not (folder / DESCRIPTION).is_file():
        return None
    return with_inputs(folder, read_description(folder))


def _shape_of(facts: Mapping[str, str]) -> TaskShape:
    """The task that a model file names. A file without a target predicts classes."""
    found = json.loads(facts.get("target", "{}"))
    lists = {name: tuple(found.get(name, ())) for name in ("names", "low", "high")}
    target = Target(found.get("kind", CLASSES), **lists, length=found.get("length", 0))
    tokens = int(facts.get("num_tokens", 0))
    return TaskShape(
        tuple(json.loads(facts["input_shape"])), int(facts["num_classes"]), SCALE, tokens, target
    )


def read_inputs(
    path: Path, saved: SavedModel, *, id_column: str | None = None, encoding: str | None = None
) -> tuple[Tensor, Tensor | None, Array | None]:
    """The inputs in a file by its ending, as the model reads them; targets and the cells of
    `id_column` if it has them. `encoding`: of a CSV file that is not UTF-8.

    .csv, .parquet: one input per row. For breast_cancer the columns are the 30 raw features by
    their names in scikit-learn; for other data all columns but those of the targets and
    `id_column`, in their order. A column `target` with class numbers may be there, or columns with
    the names of the labels or numbers. .npz: an array `inputs` (n, *input_shape), for breast_cancer
    of raw features; `targets` (n,) or (n, k) may be there. With data.name=folder the names, classes
    and ranges of the data.toml hold that the model was trained with.

    Raises:
      FolderError: the file is missing or of another kind, a column is missing, a value is missing,
        not a number, not finite or out of the model's range, or a shape does not fit.
    """
    description = description_for(path, saved, encoding)
    try:
        inputs, targets, ids = read_file(path, description, saved.shape, id_column=id_column)
    except FolderError as error:
        is_for_predict = "`discreet predict`" in str(error)
        if DESCRIPTION not in str(error) or is_for_predict or saved.description is None:
            raise
        raise FolderError(
            f"{error}. That is for the next model: this one reads by its model.json, so correct "
            "the cell"
        ) from error
    images = saved.description is None and len(saved.shape.input_shape) == 3
    if images and inputs.numel() and not (inputs.min() >= 0 and inputs.max() <= 1):
        raise FolderError(
            f"{path}: pixels must lie in [0, 1]: divide them by the largest possible value"
        )
    return inputs, targets, ids


def description_for(path: Path, saved: SavedModel, encoding: str | None) -> DataDescription:
    """The model's description, for a file in an encoding."""
    found = of_file(path, _description_of(path, saved))
    if encoding is not None:
        found = found.model_copy(update={"encoding": encoding})
    return found


def _description_of(path: Path, saved: SavedModel) -> DataDescription:
    if saved.description is not None:
        return saved.description
    if saved.data == FOLDER:
        raise FolderError(
            f"{path}: the model has no description, and the data.toml of its data no longer exists"
        )
    names = saved.shape.target.names
    arrays = path.suffix.lower() == ".npz"
    facts: dict[str, Any] = {"target": "targets" if arrays else "target"}
    if names and not arrays:
        facts = {"targets": names}
    if saved.data == "breast_cancer":
        from sklearn.datasets import load_breast_cancer

        low, high = zip(*BREAST_CANCER_RANGES, strict=True)
        facts |= {"low": low, "high": high}
        if not arrays:
            facts |= {"inputs": tuple(map(str, load_breast_cancer().feature_names))}
    return DataDescription(format="csv", file=path.name, **facts)


_SAY: dict[str, Callable[[Target, Tensor], Tensor]] = {
    CLASSES: lambda _, outputs: outputs.softmax(dim=1),
    LABELS: lambda _, outputs: outputs.sigmoid(),
    NUMBERS: Target.in_units,
    SEQUENCES: lambda _, outputs: outputs.softmax(dim=1),
    SURVIVAL: lambda _, outputs: survived(outputs),
}
# The column of a prediction for each name of a target.
_TITLES = {LABELS: "probability", NUMBERS: "prediction", SURVIVAL: "survival"}


@torch.no_grad()
def predict(saved: SavedModel, inputs: Tensor) -> Tensor:
    """Predictions for inputs (n, *input_shape), with n at least 0.

    The result is (n, k), float64: probabilities of classes or of labels, or numbers in their own
    units. For sequences it is (n, classes, length): the probabilities of classes at each position.
    For survival: the probability of no event until the end of each interval.

    Raises:
      ValueError: inputs of another shape.
    """
    if tuple(inputs.shape[1:]) != saved.shape.input_shape:
        raise ValueError(
            f"the model reads inputs of shape {saved.shape.input_shape}, not "
            f"{tuple(inputs.shape[1:])}"
        )
    target = saved.shape.target
    read = normalised_inputs(inputs, saved.normaliser)
    say = _SAY[target.kind]
    filled = [part for part in torch.split(read, BATCH) if len(part)]
    parts = [say(target, saved.model(part).double()) for part in filled]
    return torch.cat([torch.empty(0, *saved.shape.output_shape, dtype=torch.float64), *parts])


def predictions_csv(
    saved: SavedModel,
    said: Tensor,
    targets: Tensor | None = None,
    *,
    ids: tuple[str, Sequence[object]] | None = None,
) -> str:
    """A line for each input: its row from 0, its target if known, and the prediction: the most
    likely class and the probability of each; the probability of each label; each number; or the
    probability of no event until each time, where a target is 0, 1 or, if nothing is known, empty.
    Sequences have a line for each position from 0: the target, empty for padding, and the most
    likely class, also for padding.

    Args:
      said: the predictions, from `predict`.
      targets: the targets, in the form of `Examples`.
      ids: the name of a column that identifies rows, and its value in each row.
    """
    target = saved.shape.target
    columns = dict[str, Sequence[object]](row=range(len(said)))
    if ids is not None:
        columns[ids[0]] = [str(value) for value in ids[1]]
    if target.kind in (CLASSES, SEQUENCES):
        names = dict(enumerate(_class_names(saved))) | {PADDING: ""}
        for title, values in (("target", targets), ("prediction", said.argmax(dim=1))):
            if values is not None and target.kind == CLASSES:
                columns[title] = [names[int(value)] for value in values]
            elif values is not None:
                columns |= {
                    f"{title}_{i}": [names[int(v)] for v in values[:, i]]
                    for i in range(said.shape[2])
                }
        if target.kind == CLASSES:
            columns |= {
                f"probability_{names[i]}": _written(said[:, i]) for i in range(said.shape[1])
            }
    else:
        if targets is None or target.kind != NUMBERS:
            known = targets
        else:
            known = target.in_units(targets)
        for title, values in (("target", known), (_TITLES[target.kind], said)):
            if values is not None:
                columns |= {
                    f"{title}_{name}": _written(values[:, i]) for i, name in enumerate(target.names)
                }
    return csv_text([columns, *zip(*columns.values(), strict=True)])


def require_replaceable(path: Path, data: Path | None) -> None:
    """Raises FolderError if predictions written to `path` would replace anything but earlier ones:
    the file `data` that is predicted, or another file that is there."""
    if not path.exists():
        return
    if data is not None and data.exists() and path.samefile(data):
        raise FolderError(
            f"--out {path} is the file that --data reads, and would be overwritten: name a new "
            "file, such as predicted.csv"
        )
    if not _holds_predictions(path):
        raise FolderError(
            f"--out {path} exists already, and is not a file of predictions, which alone are "
            "replaced: name a new file"
        )


def _holds_predictions(path: Path) -> bool:
    """True if a file begins as `predictions_csv` writes it."""
    if not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        try:
            header = next(csv.reader(file), [])
        except csv.Error:  # a file of another kind
            return False
    titles = tuple(f"{title}_" for title in _TITLES.values())
    return header[:1] == ["row"] and header[-1].startswith(titles)


def _class_names(saved: SavedModel) -> tuple[str, ...]:
    """The class names in the folder's data.toml, or the class numbers if there are no names."""
    if saved.description is not None:
        named = saved.description.classes
    else:
        named = ()
    return named or tuple(map(str, range(saved.shape.num_classes)))


def _written(values: Tensor) -> list[str]:
    return ["" if value == PADDING else f"{float(value):.6g}" for value in values]


def indicators_of(said: Tensor, targets: Tensor, target: Target) -> dict[str, float | None]:
    """Rates predictions `said`, (n, k) as `predict` gives them, against targets; n is at least 1.
    None for no value.

    Classes: see `class_indicators`. Labels: see `label_indicators`. Numbers: r2 and mae of each,
    and the mean r2 if there are several. Survival: see `survival_indicators`. Sequences: the
    indicators of classes over all positions that are not padding, except that the loss is the mean
    over examples of each example's mean, as in a run; no values if all is padding.
    """
    if target.kind == LABELS:
        found = label_indicators(said, targets)
    elif target.kind == NUMBERS:
        each = number_scores(said, target.in_units(targets))
        named = {
            f"{score}_{name}": one[score]
            for name, one in zip(target.names, each, strict=True)
            for score in one
        }
        if len(each) == 1:
            found = each[0]
        else:
            found = {"r2": sum(one["r2"] for one in each) / len(each), **named}
    elif target.kind == SURVIVAL:
        found = survival_indicators(said, targets)
    elif target.kind == CLASSES:
        found = class_indicators(said, targets)
    elif (counted := targets != PADDING).any():
        logits = said.clamp_min(torch.finfo(torch.float64).tiny).log()
        found = class_indicators(said.movedim(1, 2)[counted], targets[counted])
        found["loss"] = float(cross_entropy(logits, targets).mean())
    else:
        found = {}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


def rated_class(saved: SavedModel) -> str | None:
    """The class that precision, recall and f1 of `indicators_of` are of: the second of two. None
    for other targets."""
    names = _class_names(saved)
    if saved.shape.target.kind not in (CLASSES, SEQUENCES) or len(names) != 2:
        return None
    return names[1]


NOTE = "on the public test set: reveals nothing about the clients' data beyond the model itself"


def write_predictions(run: Path) -> None:
    """Writes `predictions.csv` and `indicators.json` to a run folder, for the public test set.
    ConfigError: the run or its data can't be read."""
    saved = load_model(run)
    test = task_of(run).test
    said = predict(saved, test.inputs)
    replace_file(run / PREDICTIONS_FILE, predictions_csv(saved, said, test.targets).encode())
    found = indicators_of(said, test.targets, saved.shape.target)
    facts = {"note": NOTE, **found}
    if (rated := rated_class(saved)) is not None:
        facts["precision_recall_f1_of"] = rated
    write_json(run / INDICATORS_FILE, {"test": facts})


def task_of(run: Path) -> Task:
    """The data of a run. Raises ConfigError if its configuration or its data can't be read."""
    data = RunFolder(run).read_config().data
    try:
        return load_task(data.name, path=data.path)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
