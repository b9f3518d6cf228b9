"""A lower bound of epsilon from many independent runs with and without one canary, whatever the scores look like."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta

from discreet.audit.canary_scores import RepeatedScores

THRESHOLDS = 200  # that are tried on the first half


def repeated_bound(scores: RepeatedScores, *, delta: float, significance: float = 0.05) -> float:
    """log((1 - delta - b) / a), the larger of both ways, with upper limits a, b of a threshold's two error rates.

    The threshold, and the way, are chosen on every other score; the rates are counted on the rest, with
    Clopper-Pearson limits at `significance` / 2 each. At or above 0.

    Guarantee: it passes the epsilon of the mechanism at `delta` with probability at most `significance`. Assumed: the
    runs are independent. Nothing is assumed of the scores' distribution.

    Source: Jagielski, Ullman, Oprea 2020 (arXiv 2006.07709), Algorithm 1; Nasr et al. 2021 (arXiv 2101.04535), Eq. 2
    and 3; Clopper, Pearson 1934.
    """
    first, rest = RepeatedScores(scores.seen[::2], scores.unseen[::2]), (scores.seen[1::2], scores.unseen[1::2])
    if min(map(len, rest)) == 0:
        return 0.0
    both = np.concatenate([first.seen, first.unseen])
    cuts = np.unique(np.quantile(both, np.linspace(0, 1, THRESHOLDS)))
    ways = _both_ways(first.seen, first.unseen, cuts, delta=delta, level=significance / 2)
    way, number = np.unravel_index(int(np.argmax(ways)), ways.shape)
    return float(max(_both_ways(*rest, cuts[[number]], delta=delta, level=significance / 2)[way, 0], 0.0))


def _both_ways(
    seen: NDArray[np.float64], unseen: NDArray[np.float64], cuts: NDArray[np.float64], *, delta: float, level: float
) -> NDArray[np.float64]:
    """(2, cuts): the bound from "in is likely above the cut", and from "out is likely below it"."""
    missed = _upper(np.searchsorted(np.sort(seen), cuts), len(seen), level)
    false = _upper(len(unseen) - np.searchsorted(np.sort(unseen), cuts), len(unseen), level)
    found = [np.maximum(1 - delta - one, 0) / other for one, other in ((missed, false), (false, missed))]
    with np.errstate(divide="ignore"):
        return np.log(np.stack(found))


def _upper(counts: NDArray[np.int64], number: int, level: float) -> NDArray[np.float64]:
    """Clopper-Pearson's upper limit of a rate that was counted: below the rate with probability at most `level`."""
    inside = np.minimum(counts, number - 1)
    return np.where(counts < number, beta.isf(level, inside + 1, number - inside), 1.0)
