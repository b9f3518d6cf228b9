"""What the best of several private trainings costs, where how many there are was drawn at random beforehand.

Source: Papernot and Steinke 2022 (arXiv 2110.03620), Theorems 2 and 6, through dp_accounting's
`RepeatAndSelectDpEvent`. The guarantee is for whoever sees the chosen training alone: the number of trials and the
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
    NeighboringRelation,
    NonPrivateDpEvent,
    SampledWithoutReplacementDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from numpy.typing import NDArray

from discreet.privacy.accounting import RDP_ORDERS, Entries
from discreet.privacy.noise import RandomSource

# By name, the shape of the distribution (Papernot and Steinke 2022, Definition 1; Poisson is the limit).
SHAPES = {"logarithmic": 0.0, "geometric": 1.0, "poisson": math.inf}
LARGEST_MEAN = 1000.0


@dataclass(frozen=True)
class TrialCount:
    """The distribution of the number of trials: `logarithmic` and `geometric` give at least 1, `poisson` may give 0.

    Raises:
      ValueError: an unknown distribution, or a mean outside [1, 1000].
    """

    distribution: str
    mean: float

    def __post_init__(self) -> None:
        if self.distribution not in SHAPES:
            raise ValueError(f"the distribution of trials must be one of {', '.join(SHAPES)} (got {self.distribution})")
        if not 1 <= self.mean <= LARGEST_MEAN:
            raise ValueError(f"the mean number of trials must be within [1, {LARGEST_MEAN:g}] (got {self.mean})")

    def draw(self, source: RandomSource) -> int:
        """One number of trials, by inversion of a uniform value of 53 bits."""
        from scipy import stats

        value = float(source.uniform(1)[0]) + 2.0**-54  # never 0 or 1, where the inverse has no value
        if self.distribution == "poisson":
            return int(stats.poisson.ppf(value, self.mean))
        if self.mean == 1:
            return 1
        if self.distribution == "geometric":
            return int(stats.geom.ppf(value, 1 / self.mean))
        return int(stats.logser.ppf(value, _logarithmic_parameter(self.mean)))


def _logarithmic_parameter(mean: float) -> float:
    """The p of the logarithmic distribution with this mean above 1: mean = -p / ((1 - p) log(1 - p))."""
    from scipy.optimize import brentq

    def excess(log_gamma: float) -> float:
        return -math.expm1(-log_gamma) / log_gamma - mean  # gamma = 1 - p; the mean is (1 / gamma - 1) / log(1 / gamma)

    return float(-math.expm1(brentq(excess, -2 * math.log(LARGEST_MEAN) - 10, -1e-12, xtol=1e-15)))


def selection_epsilon(entries: Entries, *, trials: TrialCount, delta: float) -> float:
    """The epsilon at `delta` of releasing the best of a random number of trainings, each costing `entries`, by RDP.

    Adjacency: that of the events. "Best" may be judged by anything that is computed from the trained model, also on
    private data. 0 where a training releases nothing, infinity where one is not private.

    Raises:
      ValueError: delta outside (0, 1), or an event that RDP does not know.
    """
    _require_delta(delta)
    event = _whole(entries)
    if event is None:
        return 0.0
    if _not_private(entries):
        return math.inf
    accountant = _accountant(entries)
    if not accountant.supports(event):
        raise ValueError(f"accountant 'rdp' does not know the event {event}")
    accountant.compose(RepeatAndSelectDpEvent(event, float(trials.mean), SHAPES[trials.distribution]))
    return float(accountant.get_epsilon(delta))


def costliest(candidates: Sequence[Entries]) -> Entries:
    """The candidate that costs at least as much as every other one at every Renyi order.

    A trial that first draws one of the candidates at random, whatever the data, costs no more than it: the Renyi
    divergence of a public mixture is at most the largest of its parts.

    Raises:
      ValueError: none given, or none does: at one order one candidate costs most, at another order another.
    """
    if not candidates:
        raise ValueError("there are no candidates")
    curves = [_rdp(entries) for entries in candidates]
    highest = np.max(curves, axis=0)
    for entries, curve in zip(candidates, curves, strict=True):
        if np.array_equal(curve, highest):
            return entries
    raise ValueError(
        "the candidates differ in more than how much noise they draw, and none costs most at every order: "
        "give all of them the same rounds and sampling"
    )


def _require_delta(delta: float) -> None:
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta must be between 0 and 1, both excluded, not {delta}")


def _whole(entries: Entries) -> DpEvent | None:
    parts = [SelfComposedDpEvent(event, count) for event, count in entries if count]
    return ComposedDpEvent(parts) if parts else None


def _not_private(entries: Entries) -> bool:
    return any(isinstance(event, NonPrivateDpEvent) and count for event, count in entries)


def _accountant(entries: Entries) -> RdpAccountant:
    replaces = any(isinstance(event, SampledWithoutReplacementDpEvent) for event, _ in entries)
    relation = NeighboringRelation.REPLACE_ONE if replaces else NeighboringRelation.ADD_OR_REMOVE_ONE
    return RdpAccountant(RDP_ORDERS, relation)


def _rdp(entries: Entries) -> NDArray[np.float64]:
    event = _whole(entries)
    if event is None:
        return np.zeros(len(RDP_ORDERS))
    if _not_private(entries):
        return np.full(len(RDP_ORDERS), np.inf)
    curve: NDArray[np.float64] = _accountant(entries).compose(event).rdp
    return curve
