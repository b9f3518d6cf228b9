"""Predicts with the model of a run.

RUN is a run folder. --data is a .csv, .parquet or .npz file, or the name of a data set such as mnist, which means its
test set. Without --data it is the test set of the run's own data. `read_inputs` in discreet/federated/predictions.py
says which columns a file needs. Without --out the predictions go to predictions.csv in the run folder.

examples:
  discreet predict outputs/first
  discreet predict outputs/own --data new.csv --id patient --out predicted.csv
  discreet predict outputs/first --indicators
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from discreet.federated import predictions
from discreet.federated.prediction_tables import indicators_of, predictions_csv
from discreet.federated.predictions import Inputs, SavedModel, class_names, load_model, own_test_set, read_inputs
from discreet.federated.run_folder import replace_file
from discreet.settings.rules import ConfigError
from discreet.tasks.datasets import DATASETS, load_task
from discreet.tasks.folder import open_table


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN")],
    data: Annotated[str | None, Option(metavar="FILE", help=f"a file, or one of {', '.join(DATASETS)}")] = None,
    data_path: Annotated[str | None, Option(help="where a named data set lies, as data.path of a run")] = None,
    id_column: Annotated[
        str | None, Option("--id", metavar="COLUMN", help="tells the rows of FILE apart: it is copied")
    ] = None,
    out: Annotated[Path | None, Option(metavar="FILE", help="where the predictions are written, as CSV")] = None,
    indicators: Annotated[bool, Option("--indicators", help="write indicators.json of the public test set")] = False,
    train_indicators: Annotated[
        bool, Option("--train-indicators", help="with training data too: not private, simulations only")
    ] = False,
) -> None:
    """Predicts and writes."""
    saved = load_model(run)
    given = _inputs(run, data, saved, data_path=data_path, id_column=id_column)
    said = predictions.predict(saved, given.inputs)
    ids = None if id_column is None else (id_column, ids_of(data, id_column))
    text = predictions_csv(said, given.targets, classes=class_names(saved), target=saved.target, ids=ids)
    out = out or run / predictions.PREDICTIONS_FILE
    replace_file(out, text.encode())
    print(f"{len(said)} predictions: {out.resolve()}")
    if given.targets is not None and len(given.targets):
        found = indicators_of(said, given.targets, saved.target).items()
        print("  ".join(f"{name} {'-' if value is None else format(value, '.4f')}" for name, value in found))
    if indicators or train_indicators:
        print(f"indicators: {predictions.write_indicators(run, train=train_indicators).resolve()}")


def _inputs(run: Path, data: str | None, saved: SavedModel, *, data_path: str | None, id_column: str | None) -> Inputs:
    """The inputs in a file, of the test set of a named data set, or of the run's own test set."""
    if data is None:
        table = own_test_set(run)
        return Inputs(table.inputs, table.targets)
    if data in DATASETS:
        task = load_task(data, path=data_path)
        same = (task.shape.num_classes, task.shape.target) == (saved.num_classes, saved.target)
        return Inputs(task.test.inputs, task.test.targets if same else None)
    return read_inputs(Path(data), saved, id_column=id_column)


def ids_of(data: str | None, column: str) -> list[object]:
    """A column of a .csv or .parquet file, a value for each row.

    Raises:
      ConfigError: the file is of another kind, or has no such column.
      FolderError: it can't be read.
    """
    kind = Path(data or "").suffix.lower().removeprefix(".")
    if data is None or kind not in ("csv", "parquet"):
        raise ConfigError("--id names a column of the .csv or .parquet file that --data gives")
    table = open_table(Path(data), kind)
    if column not in table:
        raise ConfigError(f"{data} has no column {column} for --id: it has {', '.join(table)}")
    return list(table[column].to_pylist())
