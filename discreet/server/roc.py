"""ROC curves from the noised histograms of the AUC block."""

from __future__ import annotations

from typing import NamedTuple

import torch

from discreet.queries.answers import NoisedBlock, rising
from discreet.queries.metrics import LARGEST_LOGIT, SCORE_BINS, both_kinds


class RocPoint(NamedTuple):
    """A point of a ROC curve: examples with a score of at least `score`, in logits, are classified
    as positive for a class or label. Rates are in [0, 1], with standard errors as estimates for all
    clients; at the lowest score they are 1."""

    of: str
    score: float
    false_positive_rate: float
    true_positive_rate: float
    false_positive_rate_error: float = 0.0
    true_positive_rate_error: float = 0.0


def roc_points(part: NoisedBlock) -> list[RocPoint]:
    """The points of the ROC curves of an AUC block, for each score from the highest threshold down.
    A score with too few negatives or positives for the noise has none. Rates never fall as the
    threshold falls."""
    edges = torch.linspace(
        LARGEST_LOGIT, -LARGEST_LOGIT, SCORE_BINS + 1, dtype=torch.float64
    ).tolist()
    found = []
    for place, known in enumerate(both_kinds(part).tolist()):
        if known:
            curves = zip(edges, *(_rates(part, 2 * place + kind) for kind in range(2)), strict=True)
            found += [
                RocPoint(part.block.of[place], edge, *rates, *errors)
                for edge, *pairs in curves
                for rates, errors in [zip(*pairs, strict=True)]
            ]
    return found


def _rates(part: NoisedBlock, kind: int) -> list[tuple[float, float]]:
    """For each edge, from the highest down, the share of one histogram at or above it, and its
    standard error."""
    mean = part.mean.reshape(-1, SCORE_BINS)[kind]
    total = float(mean.sum())
    found = []
    curve = rising(mean / total).tolist()
    for edge, below in enumerate([*curve[:-1], 1.0]):  # the last sum is 1 up to rounding
        gradient = torch.zeros_like(part.mean)
        chosen = (torch.arange(SCORE_BINS) < edge).double()
        gradient[kind * SCORE_BINS : (kind + 1) * SCORE_BINS] = (chosen - below) / total
        found.append((1 - below, part.error(gradient) if 0 < edge < SCORE_BINS else 0.0))
    return found[::-1]
