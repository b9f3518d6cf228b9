"""Predicts with the model of a run.

RUN is a run folder. --data is a .csv, .parquet or .npz file, or the name of a data set such as mnist, which means its
test set. Without --data it is the test set of the run's own data. `read_inputs` in discreet/evaluation/predictions.py
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

from discreet.data.datasets import DATASETS, load_task
from discreet.evaluation import predictions
from discreet.server.run_folder import replace_file


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
    saved, ids = predictions.load_model(run), None
    if data is None or data in DATASETS:
        task = predictions.task_of(run) if data is None else load_task(data, path=data_path)
        same = (task.shape.num_classes, task.shape.target) == (saved.shape.num_classes, saved.shape.target)
        inputs, targets = task.test.inputs, task.test.targets if same else None
    else:
        inputs, targets, cells = predictions.read_inputs(Path(data), saved, id_column=id_column)
        ids = None if id_column is None or cells is None else (id_column, cells.tolist())
    said = predictions.predict(saved, inputs)
    out = out or run / predictions.PREDICTIONS_FILE
    replace_file(out, predictions.predictions_csv(saved, said, targets, ids=ids).encode())
    print(f"{len(said)} predictions: {out.resolve()}")
    if targets is not None and len(targets):
        found = predictions.indicators_of(said, targets, saved.shape.target).items()
        print("  ".join(f"{name} {'-' if value is None else format(value, '.4f')}" for name, value in found))
    if indicators or train_indicators:
        print(f"indicators: {predictions.write_indicators(run, train=train_indicators).resolve()}")
