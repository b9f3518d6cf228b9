"""ROC curves from noised histograms of scores: those that AUC is read from, so that they cost nothing more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from discreet.tasks.bounded_answers import Block
from discreet.tasks.examples import TaskShape
from discreet.tasks.metric_answers import LARGEST_LOGIT, SCORE_BINS, score_names
from discreet.tasks.noised_means import Noise, NoisedBlock, both_kinds, noised_blocks, rising


@dataclass(frozen=True)
class RocPoint:
    """What a threshold does: examples with a score of at least `score`, in logits, are called positive.

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


def roc_points(blocks: Sequence[Block], mean: Tensor, noise: Noise, *, shape: TaskShape) -> list[RocPoint]:
    """The points of the ROC curves, from the highest threshold down, of each score in turn; none without `auc` among
    the blocks, and none of a score of whose negatives or positives noise leaves nothing. Post-processing of the noised
    mean of clients' answers, (length,). Rates never fall as the threshold does: see `noised_means.rising`.

    Raises:
      ValueError: the mean has another length.
    """
    parts = [part for part in noised_blocks(blocks, mean, noise) if part.block.name == "auc"]
    return [point for part in parts for point in _points(part, score_names(shape))]


def _points(part: NoisedBlock, names: Sequence[str]) -> Iterator[RocPoint]:
    edges = torch.linspace(-LARGEST_LOGIT, LARGEST_LOGIT, SCORE_BINS + 1, dtype=torch.float64)
    for place, (name, usable) in enumerate(zip(names, both_kinds(part).tolist(), strict=True)):
        if usable:
            negatives, positives = (_rates(part, 2 * place + kind) for kind in range(2))
            for edge in range(SCORE_BINS, -1, -1):
                (false, its_error), (true, error) = negatives[edge], positives[edge]
                yield RocPoint(name, float(edges[edge]), false, true, its_error, error)


def _rates(part: NoisedBlock, kind: int) -> list[tuple[float, float]]:
    """For each edge the share of one histogram that is not below it, and its standard error."""
    mean = part.mean.reshape(-1, SCORE_BINS)[kind]
    total, found = float(mean.sum()), []
    curve = rising(mean / total).tolist()
    for edge, below in enumerate([*curve[:-1], 1.0]):  # the last sum is 1, but for rounding
        gradient = torch.zeros(part.block.length, dtype=torch.float64)
        chosen = (torch.arange(SCORE_BINS) < edge).double()
        gradient[kind * SCORE_BINS : (kind + 1) * SCORE_BINS] = (chosen - below) / total
        found.append((1 - below, part.error(gradient) if 0 < edge < SCORE_BINS else 0.0))
    return found
