"""Predicts with the model of a run.

RUN is a run folder. --data is a .csv, .parquet, .jsonl or .npz file; without it the test set of the
run's own data is predicted. `read_inputs` in discreet/run_files/predictions.py says which columns a
file needs. Scores of the test set have 95 % intervals by bootstrap. Without --out the predictions
go to predictions.csv in the run folder. --out replaces earlier predictions, and no other file.
Cells of no level and cells outside their range are counted. The description that was saved with the
model (model.json) holds, not what data.toml says today; where they differ, the keys are named.

examples:
  discreet predict outputs/first
  discreet predict outputs/own --data new.csv --id patient --out predicted.csv
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from discreet.data.description import DataDescription
from discreet.data.folder import opened
from discreet.data.targets import FolderError
from discreet.run_files import predictions
from discreet.run_files.model_description import differences
from discreet.run_files.score_intervals import Interval, interval_words, intervals_of
from discreet.run_files.whole_files import replace_file
from discreet.tables.cell_counts import cell_counts, readings_of


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN")],
    data: Annotated[Path | None, Option(metavar="FILE", help="what is predicted")] = None,
    id_column: Annotated[
        str | None,
        Option("--id", metavar="COLUMN", help="tells the rows of FILE apart: it is copied"),
    ] = None,
    encoding: Annotated[
        str | None, Option(help="of FILE, if it is not UTF-8, such as cp1252")
    ] = None,
    out: Annotated[
        Path | None, Option(metavar="FILE", help="where the predictions are written, as CSV")
    ] = None,
) -> None:
    """Predicts and writes."""
    out = out or run / predictions.PREDICTIONS_FILE
    predictions.require_replaceable(out, data)
    saved = predictions.load_model(run)
    test = None
    _say_differences(run, saved.description)
    if data is not None:
        inputs, targets, cells = predictions.read_inputs(
            data, saved, id_column=id_column, encoding=encoding
        )
        _say_counts(data, predictions.description_for(data, saved, encoding))
    else:
        test = predictions.task_of(run).test
        inputs = test.inputs
        targets = test.targets
        cells = None
    if id_column is None or cells is None:
        ids = None
    else:
        ids = (id_column, cells.tolist())
    if data is not None and not len(inputs):
        print(f"discreet: {data} has no rows to predict", file=sys.stderr)
    said = predictions.predict(saved, inputs)
    replace_file(out, predictions.predictions_csv(saved, said, targets, ids=ids).encode())
    print(f"{len(said)} predictions: {out.resolve()}")
    if targets is not None and len(targets):
        target = saved.shape.target
        found = predictions.indicators_of(said, targets, target)
        known = {}
        if test is not None:  # rows of a file may be of one person, which is not known there
            known = intervals_of(said, targets, target, owners=test.owners)
        print("  ".join(_rating(name, value, known.get(name)) for name, value in found.items()))
        if (rated := predictions.rated_class(saved)) is not None:
            print(f"precision, recall and f1 are of the class {rated}, the second of two")


def _say_counts(path: Path, description: DataDescription) -> None:
    """Says which cells the model reads as something else."""
    if description.columns:
        found = opened(path, description)
        cells = {name: column.to_pylist() for name, column in found.items()}
        for each in cell_counts(readings_of(cells, description), description):
            for line in each.lines(str):
                print(f"discreet: {line}", file=sys.stderr)


def _rating(name: str, value: float | None, interval: Interval | None) -> str:
    if value is None:
        return f"{name} -"
    return f"{name} {value:.4f}" + (f" ({interval_words(interval)})" if interval else "")


def _say_differences(run: Path, then: DataDescription | None) -> None:
    if then is None:
        return
    told = ""
    try:
        now = predictions.described_today(run)
        if now is not None and (keys := differences(then, now)):
            told = f"data.toml now differs in {', '.join(keys)}"
    except FolderError as error:
        told = str(error)
    if told:
        print(
            f"discreet: {told}: the description that was saved with the model holds",
            file=sys.stderr,
        )
