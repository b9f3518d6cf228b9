"""The columns and rows of metrics.csv: a model's scores beside the loss, and the lines as text.
Commands without PyTorch read them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from discreet.queries.evaluation_result import EvaluationResult
from discreet.run_files.csv_text import cell_text, csv_text
from discreet.settings.adjacency import GUARANTEES

# A round's score columns beside the loss, and those by which models are compared: larger is better.
SCORES = ("accuracy", "balanced_accuracy", "auc", "r2", "mae", "concordance")
MAIN = ("accuracy", "r2", "concordance")
# Suffixes of two more columns of a federated score: its standard error in all, and by noise alone.
ERROR = "_error"
BY_NOISE = "_error_by_noise"
ERRORS = (ERROR, BY_NOISE)

METRICS = (  # after round, loss and the scores of the task
    "clip_norm",
    "fraction_below",
    "cohort",
    "replies",
    "epsilon_user",
    "epsilon_example",
    "epsilon_local",
    "seconds",
)
END = "\r\n"  # of a line
# the words, columns and formats of the numbers in the line about a round
SHOWN = (*((name, name, ".4f") for name in (*SCORES, "loss")), ("clip", "clip_norm", ".3g"))


def unrated(names: Iterable[str] = ()) -> EvaluationResult:
    """The empty result of a server without a test set. A row of metrics.csv has columns for each
    score that clients may add later, and for its standard errors."""
    return EvaluationResult(
        None, dict.fromkeys([f"{name}{end}" for end in ("", ERROR, BY_NOISE) for name in names])
    )


def main_score(names: Iterable[str]) -> str:
    """The score by which models with these columns are compared; accuracy if there is none yet."""
    given = {*names}
    for name in MAIN:
        if name in given:
            return name
    return MAIN[0]


def score_columns(rows: Iterable[Mapping[str, object]]) -> list[str]:
    """The scores that appear in any of these rows, in the order of `SCORES`; accuracy if none
    does."""
    given = {name for row in rows for name in row}
    return [name for name in SCORES if name in given] or [MAIN[0]]


@dataclass(frozen=True)
class Rated:
    """A score of a model from federated evaluation.

    Attributes:
      value: NaN if the noise is too large for an estimate.
      error: standard error as an estimate for all clients: from the noise and the sampling of the
        cohort.
      by_noise: standard error as an estimate for the sampled clients: from the noise alone; None in
        an older run.
    """

    name: str
    value: float
    error: float
    by_noise: float | None = None

    @property
    def known(self) -> bool:
        """True if there is an estimate."""
        return math.isfinite(self.value) and math.isfinite(self.error)

    def __str__(self) -> str:
        """
        >>> str(Rated("accuracy", 0.75, 0.0348, 0.0179))
        'accuracy 0.7500 (standard error 0.0348; 0.0179 by noise alone)'
        >>> str(Rated("accuracy", 0.0, 0.2, 0.2))
        'accuracy 0.0000, cut to its range (standard error 0.2000; 0.2000 by noise alone)'
        """
        if not self.known:
            return f"{self.name} not known (the noise leaves nothing to read)"
        if self.by_noise is None:
            noise = ""
        else:
            noise = f"; {self.by_noise:.4f} by noise alone"
        cut = ""
        if self.by_noise and self.value in (0.0, 1.0):  # noise never ends there by itself
            cut = ", cut to its range"
        return f"{self.name} {self.value:.4f}{cut} (standard error {self.error:.4f}{noise})"


def rated_in(row: Mapping[str, float | None]) -> list[Rated]:
    """The federated scores of the model after a round, from its row of metrics.csv; empty if there
    are none."""
    found = []
    for name, value in row.items():
        error = row.get(f"{name}{ERROR}")
        if value is not None and error is not None:
            found.append(Rated(name, value, error, row.get(f"{name}{BY_NOISE}")))
    return found


def columns_of(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """The columns of the rows: those of every run, then any others in the rows."""
    names = [name for row in rows for name in row]
    return [*dict.fromkeys(["round", "loss", *score_columns(rows), *METRICS, *names])]


def table_of(rows: Sequence[Mapping[str, object]]) -> str:
    """The rows as CSV below a header, one cell per column."""
    columns = columns_of(rows)
    header = csv_text([columns], end=END)
    return header + "".join(line_of(row, columns) for row in rows)


def line_of(row: Mapping[str, object], columns: Sequence[str]) -> str:
    """A row as a line of CSV, one cell per column. Its values are numbers."""
    return ",".join(cell_text(row.get(name), digits=10) for name in columns) + END


def round_line(row: Mapping[str, Any], *, rounds: int) -> str:
    """One line about a round. Disabled guarantees have no epsilon in it, and a server that does not
    clip has no clip norm.

    >>> row = {"round": 2, "loss": 0.5, "cohort": 9, "replies": 8, "seconds": 0.25}
    >>> row |= {"epsilon_user": 1.5, "clip_norm": math.inf}
    >>> round_line(row, rounds=30)
    'round 2/30  loss 0.5000  replies 8/9  epsilon user 1.500  0.2 s'
    """
    said = [f"round {row['round']}/{rounds}"]
    own = [
        (name, name, ".4f") for name in row if ":" in name and not name.endswith((ERROR, BY_NOISE))
    ]
    for name, column, form in (*own, *SHOWN):
        value = row.get(column)
        unclipped = column == "clip_norm" and value == math.inf
        if value is not None and not unclipped:
            said.append(f"{name} {value:{form}}")
    said.append(f"replies {row['replies']}/{row['cohort']}")
    spent = []
    for name in GUARANTEES:
        epsilon = row.get(f"epsilon_{name}", math.inf)
        if math.isfinite(epsilon):
            spent.append(f"{name} {epsilon:.3f}")
    said.append(f"epsilon {' '.join(spent) or 'none'}")
    said.append(f"{row.get('seconds', math.nan):.1f} s")
    return "  ".join(said)
