"""Private selection: the privacy cost of the best of several private trainings, if their number was
drawn at random beforehand.

Source: Papernot and Steinke 2022 (arXiv 2110.03620), Theorems 2 and 6, through dp_accounting's
`RepeatAndSelectDpEvent`. The observer sees the chosen training alone: the number of trials and the
trials that were not chosen must stay with the server.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting.dp_event import RepeatAndSelectDpEvent

from discreet.accounting.accounting import Entries, rdp_curve
from discreet.privacy.randomness import RandomSource

# Shape parameter of each distribution (Papernot and Steinke 2022, Definition 1; Poisson is the
# limit).
SHAPES = {"logarithmic": 0.0, "geometric": 1.0, "poisson": math.inf}
LARGEST_MEAN = 1000.0


@dataclass(frozen=True)
class TrialCount:
    """The distribution of the number of trials, with a mean within [1, 1000]: `logarithmic` and
    `geometric` give at least 1, `poisson` may give 0.
    """

    distribution: str
    mean: float

    def __post_init__(self) -> None:
        if self.distribution not in SHAPES:
            raise ValueError(
                f"the distribution of trials must be one of {', '.join(SHAPES)} (got "
                f"{self.distribution})"
            )
        if not 1 <= self.mean <= LARGEST_MEAN:
            raise ValueError(
                f"the mean number of trials must be within [1, {LARGEST_MEAN:g}] (got {self.mean})"
            )

    def draw(self, source: RandomSource) -> int:
        """Draws a number of trials from uniform values of 53 bits.

        The Poisson distribution is drawn by inversion. The logarithmic one is a mixture of
        geometric ones, whose parameter 1 - gamma^U is drawn first (Kemp 1981).
        """
        from scipy import stats

        first, second = (source.uniform(2) + 2.0**-54).tolist()  # never 0 or 1
        if self.distribution == "poisson":
            return int(stats.poisson.ppf(first, self.mean))
        if self.mean == 1:
            return 1
        geometric = self.distribution == "geometric"
        if geometric:
            going_on = 1 - 1 / self.mean
        else:
            going_on = -math.expm1(-second * _log_inverse_gamma(self.mean))
        return 1 + math.floor(math.log(first) / math.log(going_on))


def _log_inverse_gamma(mean: float) -> float:
    """log(1 / gamma) of the logarithmic distribution with a `mean` of (1 / gamma - 1) / log(1 /
    gamma)."""
    from scipy.optimize import brentq

    return float(
        brentq(lambda x: math.expm1(x) / x - mean, 1e-12, 4 * math.log(LARGEST_MEAN), xtol=1e-15)
    )


def selection_event(candidates: Sequence[Entries], *, trials: TrialCount) -> DpEvent:
    """The event of releasing the best of a random number of trials, for the RDP accountant.

    A trial draws one of the candidates at random, independently of the data, and costs its entries.
    "Best" may be judged by any function of a trial's releases. Adjacency: that of the events.
    ``NoOpDpEvent`` if trials release nothing, ``NonPrivateDpEvent`` if a candidate is not private.

    One candidate must cost at least as much as every other one at every Renyi order; otherwise
    ValueError is raised. The Renyi divergence of a public mixture is at most the largest of its
    parts, so the trials together cost no more than trials of that candidate alone.
    """
    if not candidates:
        raise ValueError("there are no candidates")
    if any(
        isinstance(event, NonPrivateDpEvent) and count
        for entries in candidates
        for event, count in entries
    ):
        return NonPrivateDpEvent()
    # Divergences grow with the order: if one is unknown, that of the next order is a bound.
    curves = np.array(
        [np.minimum.accumulate(rdp_curve(entries)[::-1])[::-1] for entries in candidates]
    )
    if not curves.any():
        return NoOpDpEvent()
    pairs = zip(candidates, (curves == curves.max(axis=0)).all(axis=1), strict=True)
    costliest = next((entries for entries, is_highest in pairs if is_highest), None)
    if costliest is None:
        raise ValueError(
            "the candidates differ in more than how much noise they draw, and none costs most at "
            "every Renyi order: give all of them the same rounds and sampling"
        )
    parts = [SelfComposedDpEvent(event, count) for event, count in costliest if count]
    if len(parts) == 1:
        whole = parts[0]
    else:
        whole = ComposedDpEvent(parts)
    return RepeatAndSelectDpEvent(whole, float(trials.mean), SHAPES[trials.distribution])
