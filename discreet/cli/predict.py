"""Predicts with the model of a run.

RUN is a run folder. --data is a .csv, .parquet or .npz file, or the name of a data set such as mnist, which means its
test set. Without --data it is the test set of the run's own data. `read_inputs` in discreet/federated/predictions.py
says which columns a file needs. Without --out the predictions go to predictions.csv in the run folder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from discreet.config import ConfigError
from discreet.federated.prediction_tables import indicators_of, predictions_csv
from discreet.federated.predictions import (
    PREDICTIONS_FILE,
    Inputs,
    SavedModel,
    class_names,
    load_model,
    own_test_set,
    predict,
    read_inputs,
    write_indicators,
)
from discreet.federated.run_folder import replace_file
from discreet.tasks.datasets import DATASETS, load_task
from discreet.tasks.folder import open_table

EXAMPLES = """examples:
  discreet predict outputs/first
  discreet predict outputs/own --data new.csv --id patient --out predicted.csv
  discreet predict outputs/first --indicators
"""


def inputs_of(arguments: argparse.Namespace, saved: SavedModel) -> Inputs:
    """What is predicted for: a file, the test set of a named data set, or that of the run.

    Raises:
      ConfigError, ValueError, OSError: it can't be read.
    """
    data: str | None = arguments.data
    if data is None:
        table = own_test_set(arguments.run)
        return Inputs(table.inputs, table.targets)
    if data in DATASETS:
        task = load_task(data, path=arguments.data_path)
        same = (task.shape.num_classes, task.shape.target) == (saved.num_classes, saved.target)
        return Inputs(task.test.inputs, task.test.targets if same else None)
    return read_inputs(Path(data), saved, id_column=arguments.id)


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="discreet predict",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument(
        "--data", metavar="FILE", help=f"a .csv, .parquet or .npz file, or one of {', '.join(DATASETS)}"
    )
    parser.add_argument("--data-path", metavar="PATH", help="where a named data set lies, as data.path of a run")
    parser.add_argument("--id", metavar="COLUMN", help="a column of FILE that tells its rows apart: it is copied")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the predictions are written, as CSV")
    parser.add_argument(
        "--indicators",
        action="store_true",
        help="write indicators.json of the run's public test set into the run folder",
    )
    parser.add_argument(
        "--train-indicators", action="store_true", help="the same with training data: not private, simulations only"
    )
    return parser


def main(words: Sequence[str]) -> int:
    """Predicts and writes; 2 if the run or the data can't be read."""
    arguments = _parser().parse_args(words)
    run: Path = arguments.run
    out: Path = arguments.out or run / PREDICTIONS_FILE
    try:
        saved = load_model(run)
        given = inputs_of(arguments, saved)
        said = predict(saved, given.inputs)
        ids = None if arguments.id is None else (arguments.id, ids_of(arguments.data, arguments.id))
        text = predictions_csv(said, given.targets, classes=class_names(saved), target=saved.target, ids=ids)
        replace_file(out, text.encode())
        print(f"{len(said)} predictions: {out.resolve()}")
        if given.targets is not None and len(given.targets):
            found = indicators_of(said, given.targets, saved.target).items()
            print("  ".join(f"{name} {'-' if value is None else format(value, '.4f')}" for name, value in found))
        if arguments.indicators or arguments.train_indicators:
            print(f"indicators: {write_indicators(run, train=arguments.train_indicators).resolve()}")
    except (ConfigError, ValueError, OSError) as error:
        print(f"discreet: {error}", file=sys.stderr)
        return 2
    return 0
