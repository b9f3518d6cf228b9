"""The result of an evaluation. Commands without PyTorch read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class EvaluationResult:
    """The evaluation of a model: its loss (lower is better), and its scores by name. None: not
    known."""

    loss: float | None
    scores: Mapping[str, float | None]
