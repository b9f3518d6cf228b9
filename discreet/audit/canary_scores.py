"""Scores of canaries, and the claim they are set beside: all that the statistics of an audit read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from discreet.accounting.privacy_ledger import PrivacyLedger
    from discreet.server.plan import Plan

Facts = Mapping[str, str | int | float | bool]


@dataclass(frozen=True)
class Claim:
    """The guarantee that a ledger states for the releases that were scored; `adjacency` is in words."""

    epsilon: float
    delta: float
    adjacency: str

    @classmethod
    def of(cls, plan: Plan, guarantee: str, spent: PrivacyLedger) -> Self:
        """The claim of a ledger at the delta, and by the accountant, of a run."""
        adjacency = next(each.adjacency for each in plan.guarantees if each.name == guarantee)
        return cls(spent.epsilon(plan.run.delta, plan.run.accountant), plan.run.delta, adjacency)


@dataclass(frozen=True, eq=False)
class Scores:
    """One score for each canary of a run, or for each of many releases of one canary.

    Attributes:
      values: (k,) float64, finite; a higher score says "in".
      included: (k,) bool, true if the canary was in. The bounds of one run hold only for independent fair coins.
      centred: the score of a canary that is out has the mean 0 by design. It has if the canary then sends nothing and
        its direction has a random sign: the release does not depend on that sign.
    """

    values: NDArray[np.float64]
    included: NDArray[np.bool_]
    centred: bool = False

    def __post_init__(self) -> None:
        if not np.isfinite(self.values).all():
            raise ValueError("scores must be finite")

    @property
    def seen(self) -> NDArray[np.float64]:
        """The scores with the canary in."""
        return self.values[self.included]

    @property
    def unseen(self) -> NDArray[np.float64]:
        """The scores with the canary out."""
        return self.values[~self.included]


@dataclass(frozen=True)
class Releases:
    """The releases that canaries are sent through: `rounds` of them, for which `claim` stands.

    Attributes:
      probability: with which a canary is in the cohort of one.
      noise_multiplier: of each; None if the noise is not Gaussian, so that nothing is fitted.
      repeated: one canary is released again and again, half of the times without it. Then the mean of the scores
        without it is fitted too: of canaries whose directions have random signs it is known to be 0.
    """

    rounds: int
    probability: float
    noise_multiplier: float | None
    claim: Claim
    repeated: bool = False

    def shift(self, share: float) -> float:
        """The distance between in and out, in standard deviations, if the noise is `share` of its size.

        A canary that is in adds rounds * q of its own length on the average, with the variance rounds * q (1 - q); the
        noise adds rounds * (share * z)^2 to each canary. In is as likely as out, so half of the former counts.
        """
        assert self.noise_multiplier is not None
        added, noise = self.rounds * self.probability, self.rounds * (share * self.noise_multiplier) ** 2
        return added / math.sqrt(noise + added * (1 - self.probability) / 2)


@dataclass(frozen=True)
class Observation:
    """The scores from one release ("round 3"), or from all of a run ("run"), and the claim for exactly these."""

    name: str
    claim: Claim
    scores: Scores


@dataclass(frozen=True)
class Experiment:
    """Everything an audit observed; the last observation is of the whole run, and so are the releases. The settings are
    those that are written to audit.json."""

    mechanism: str
    observations: tuple[Observation, ...]
    settings: Facts
    releases: Releases


def observed(rounds: Sequence[tuple[Claim, Scores]], run: Claim) -> tuple[Observation, ...]:
    """Each round by itself, and the run: the scores of a canary in all rounds, added up."""
    total = np.sum([scores.values for _, scores in rounds], axis=0)
    named = [Observation(f"round {number}", *each) for number, each in enumerate(rounds, 1)]
    return (*named, Observation("run", run, replace(rounds[-1][1], values=total)))
