"""roc.csv of a run folder: the ROC curves of the models that clients have rated, a row a point."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import astuple, fields
from pathlib import Path

from discreet.federated.run_folder import replace_file
from discreet.settings.rules import ConfigError
from discreet.tasks.noised_answers import RocPoint

ROC_FILE = "roc.csv"
COLUMNS = ("round", *(field.name for field in fields(RocPoint)))


def write_roc(folder: Path, number: int, points: Sequence[RocPoint]) -> None:
    """Adds the curves of the model after a round, in place of those that are there of it; without points there is no
    file."""
    kept = [(each, point) for each, point in read_roc(folder) if each != number]
    if not kept and not points:
        return
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerows(
        [COLUMNS, *((each, *astuple(point)) for each, point in [*kept, *((number, one) for one in points)])]
    )
    replace_file(folder / ROC_FILE, text.getvalue().encode())


def read_roc(folder: Path) -> list[tuple[int, RocPoint]]:
    """Each point with the round whose model it is of; empty if there are none.

    Raises:
      ConfigError: what is there are not such rows.
    """
    path = folder / ROC_FILE
    if not path.exists():
        return []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            header, *rows = csv.reader(file)
        if tuple(header) != COLUMNS:
            raise ValueError(f"its columns are {', '.join(header)}")
        return [(int(number), RocPoint(of, *map(float, numbers))) for number, of, *numbers in rows]
    except (ValueError, TypeError, csv.Error) as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
