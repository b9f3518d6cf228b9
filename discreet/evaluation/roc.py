"""ROC curves of the models that clients have rated, read from the histograms that AUC is read from, and roc.csv of a
run folder, with a row a point."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch

from discreet.queries.answers import NoisedBlock, rising
from discreet.queries.metric_answers import LARGEST_LOGIT, SCORE_BINS, both_kinds
from discreet.server.run_folder import replace_file
from discreet.settings.rules import ConfigError

ROC_FILE = "roc.csv"


@dataclass(frozen=True)
class RocPoint:
    """The effect of a threshold: examples with a score of at least `score`, in logits, are called positive.

    Attributes:
      of: what the score is of: a class, or a label.
      false_positive_rate, true_positive_rate: of the negatives and of the positives, in [0, 1]. Those of the lowest
        score are 1: all that lies below it counts too.
      false_positive_rate_error, true_positive_rate_error: their standard errors, as those of all clients.
    """

    of: str
    score: float
    false_positive_rate: float
    true_positive_rate: float
    false_positive_rate_error: float
    true_positive_rate_error: float


def roc_points(part: NoisedBlock) -> list[RocPoint]:
    """The points of the ROC curves of a block of AUC, from the highest threshold down, of each score in turn; none of a
    score of whose negatives or positives noise leaves nothing. Rates never fall as the threshold does."""
    edges = torch.linspace(-LARGEST_LOGIT, LARGEST_LOGIT, SCORE_BINS + 1, dtype=torch.float64).tolist()
    found = []
    for place, known in enumerate(both_kinds(part).tolist()):
        if known:
            curves = zip(edges, *(_rates(part, 2 * place + kind) for kind in range(2)), strict=True)
            points = [
                RocPoint(part.block.of[place], edge, false, true, its_error, error)
                for edge, (false, its_error), (true, error) in curves
            ]
            found += points[::-1]
    return found


def _rates(part: NoisedBlock, kind: int) -> list[tuple[float, float]]:
    """For each edge the share of one histogram that is not below it, and its standard error."""
    mean = part.mean.reshape(-1, SCORE_BINS)[kind]
    total, found = float(mean.sum()), []
    curve = rising(mean / total).tolist()
    for edge, below in enumerate([*curve[:-1], 1.0]):  # the last sum is 1, but for rounding
        gradient = torch.zeros_like(part.mean)
        chosen = (torch.arange(SCORE_BINS) < edge).double()
        gradient[kind * SCORE_BINS : (kind + 1) * SCORE_BINS] = (chosen - below) / total
        found.append((1 - below, part.error(gradient) if 0 < edge < SCORE_BINS else 0.0))
    return found


COLUMNS = ("round", *(field.name for field in fields(RocPoint)))


def write_roc(folder: Path, number: int, points: Sequence[RocPoint]) -> None:
    """Adds the curves of the model after a round, in place of those that are there of it; without points there is no
    file."""
    rows = [(each, point) for each, point in read_roc(folder) if each != number] + [(number, one) for one in points]
    if rows:
        text = io.StringIO(newline="")
        csv.writer(text).writerows([COLUMNS, *((each, *astuple(point)) for each, point in rows)])
        replace_file(folder / ROC_FILE, text.getvalue().encode())


def read_roc(folder: Path) -> list[tuple[int, RocPoint]]:
    """Each point with the round whose model it is of; empty if there are none.

    Raises:
      ConfigError: the file holds other rows.
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
