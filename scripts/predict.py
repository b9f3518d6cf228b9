"""What the model of a run says: `python -m scripts.predict RUN --data FILE --out FILE`

RUN is a run folder. FILE of --data ends in .csv or .npz; a name such as mnist means the test set of that data set, and
without --data it is the test set of the run's own data. Columns and shapes:
discreet/federated/input_tables.py. Without --out the predictions go to predictions.csv in the run folder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from discreet.config import ConfigError
from discreet.federated.input_tables import Inputs, read_inputs
from discreet.federated.predictions import (
    PREDICTIONS_FILE,
    SavedModel,
    class_names,
    indicators_of,
    load_model,
    own_test_set,
    predict,
    predictions_csv,
    write_indicators,
)
from discreet.federated.run_folder import replace_file
from discreet.tasks.datasets import DATASETS, load_task


def inputs_of(run: Path, saved: SavedModel, *, data: str | None, data_path: str | None) -> Inputs:
    """What is predicted for: a file, the test set of a named data set, or that of the run.

    Raises:
      ConfigError, ValueError, OSError: it can't be read.
    """
    if data is None:
        table = own_test_set(run)
        return Inputs(table.inputs, table.targets)
    if data in DATASETS:
        task = load_task(data, path=data_path)
        return Inputs(task.test.inputs, task.test.targets if task.num_classes == saved.num_classes else None)
    return read_inputs(Path(data), saved)


def ids_of(data: str | None, column: str) -> list[object]:
    """A column of a .csv or .parquet file, a value for each row.

    Raises:
      ConfigError: the file is another one, or has no such column.
    """
    from pyarrow import csv, parquet  # type: ignore[import-untyped]

    readers = {".csv": csv.read_csv, ".parquet": parquet.read_table}
    kind = Path(data or "").suffix.lower()
    if kind not in readers:
        raise ConfigError("--id names a column of the .csv or .parquet file that --data gives")
    table = readers[kind](data)
    if column not in table.column_names:
        raise ConfigError(f"{data} has no column {column} for --id: it has {', '.join(table.column_names)}")
    found: list[object] = table.column(column).to_pylist()
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.predict", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--data", metavar="FILE", help=f"a .csv or .npz file, or one of {', '.join(DATASETS)}")
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
    """Predicts and writes; 2 where the run or the data can't be read."""
    arguments = _parser().parse_args(words)
    run: Path = arguments.run
    out: Path = arguments.out or run / PREDICTIONS_FILE
    try:
        saved = load_model(run)
        given = inputs_of(run, saved, data=arguments.data, data_path=arguments.data_path)
        probabilities = predict(saved, given.inputs)
        ids = None if arguments.id is None else (arguments.id, ids_of(arguments.data, arguments.id))
        text = predictions_csv(probabilities, given.targets, classes=class_names(saved), ids=ids)
        replace_file(out, text.encode())
        print(f"{len(probabilities)} predictions: {out.resolve()}")
        if given.targets is not None and len(given.targets):
            print(_line(indicators_of(probabilities, given.targets)))
        if arguments.indicators or arguments.train_indicators:
            print(f"indicators: {write_indicators(run, train=arguments.train_indicators).resolve()}")
    except (ConfigError, ValueError, OSError) as error:
        print(f"discreet: {error}", file=sys.stderr)
        return 2
    return 0


def _line(found: dict[str, float | None]) -> str:
    return "  ".join(f"{name} {'-' if value is None else format(value, '.4f')}" for name, value in found.items())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
