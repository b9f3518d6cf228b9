"""The constant guess on the public test set, which every model should beat."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from discreet.data.examples import Task
from discreet.data.targets import CLASSES
from discreet.queries.metrics import is_uneven
from discreet.settings.training import TaskConfig

FILE = "constant_guess.json"
REMEDY = (
    "more clients, a larger epsilon or fewer columns may help; evaluation.keep=best keeps the best "
    "round"
)
NOTHING_LEARNED = {"r2": 0.0, "concordance": 0.5}  # scores of the same answer for everybody
ROUNDING = 1e-9  # metrics.csv has ten digits


@dataclass(frozen=True)
class ConstantGuess:
    """The best constant guess on the test set.

    Attributes:
      share: its accuracy, the share of the most frequent class.
      loss: the cross entropy of predicting the class shares; None if the run has another loss.
      uneven: True if predicting the most frequent class alone gives a high accuracy; runs then
        report other scores, too.
    """

    share: float
    loss: float | None
    uneven: bool

    def __str__(self) -> str:
        if self.loss is None:
            loss = ""
        else:
            loss = f", and a loss of {self.loss:.4f}"
        return f"on the test set a constant guess has an accuracy of {self.share:.4f}{loss}"

    def warning(self, row: Mapping[str, Any]) -> str | None:
        """A warning if the model with this row of metrics.csv does not beat the guess; otherwise
        None."""
        if self.share == 1:
            return "the test set has one class alone, so no score of it says what the model learned"
        said = list[str]()
        accuracy = row.get("accuracy")
        loss = row.get("loss")
        if accuracy is not None and accuracy <= self.share + ROUNDING:
            others = [
                f"{name} {row[name]:.3f}"
                for name in ("auc", "balanced_accuracy")
                if math.isfinite(row.get(name) or math.nan)
            ]
            if others:
                read = f": read {' and '.join(others)} instead"
            else:
                read = ", which the same answer for everybody has"
            said.append(
                f"accuracy {accuracy:.3f} is not above the share of the largest class, "
                f"{self.share:.3f}{read}"
            )
        if self.loss is not None and loss is not None and not loss <= self.loss:
            said.append(
                f"loss {loss:.3f} is above the {self.loss:.3f} of a constant guess, so do not "
                f"trust its probabilities: {REMEDY}"
            )
        return "; ".join(said) or None


def constant_guess(task: Task, settings: TaskConfig) -> ConstantGuess | None:
    """The constant guess on a task's test set; None without a test set or for a task without
    classes."""
    if task.shape.target.kind != CLASSES or not len(task.test):
        return None
    counts = torch.bincount(task.test.targets, minlength=task.shape.num_classes).double()
    shares = counts / counts.sum()
    plain = (
        settings.loss in (None, "cross_entropy", "least_squares") and settings.class_weights is None
    )
    if plain:
        loss = max(0.0, float(-torch.special.xlogy(shares, shares).sum()))  # -0.0 of one class
    else:
        loss = None
    return ConstantGuess(
        float(shares.max()), loss, is_uneven(task.test.targets, task.shape.num_classes)
    )


def last_warning(guess: ConstantGuess | None, rows: Sequence[Mapping[str, Any]]) -> str | None:
    """The warning about a run's last model; None if it has no guess to beat, or beats it. For
    numbers the guess is the test set's mean, whose R2 is 0; for survival the same risk for all."""
    rated = [row for row in rows if row.get("loss") is not None and math.isfinite(row["loss"])]
    if not rated:
        return None
    if guess is not None:
        return guess.warning(rated[-1])
    for name, nothing in NOTHING_LEARNED.items():
        score = rated[-1].get(name)
        if score is not None and score <= nothing:
            same = "which the same answer for everybody has"
            return f"{name} {score:.3f} is not above {nothing:g}, {same}: {REMEDY}"
    return None
