"""What an audit observed: a score for each canary, and whether the canary was in. The statistics read nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from discreet.privacy.privacy_ledger import PrivacyLedger
    from discreet.settings import PrivacyConfig


@dataclass(frozen=True)
class Claim:
    """What a ledger says of the releases that were scored.

    Attributes:
      epsilon: at or above 0; `math.inf` if there is no guarantee.
      delta: within (0, 1).
      adjacency: in words, for instance "add or remove one client".
    """

    epsilon: float
    delta: float
    adjacency: str

    @classmethod
    def of(cls, privacy: PrivacyConfig, spent: PrivacyLedger, adjacency: str) -> Self:
        """What a ledger with these events says at the delta, and by the accountant, of a configuration."""
        return cls(spent.epsilon(privacy.delta, privacy.accountant), privacy.delta, adjacency)

    def __post_init__(self) -> None:
        if not self.epsilon >= 0:
            raise ValueError(f"epsilon must be at or above 0 (got {self.epsilon})")
        if not 0 < self.delta < 1:
            raise ValueError(f"delta must be within (0, 1) (got {self.delta})")


@dataclass(frozen=True, eq=False)
class CanaryScores:
    """The scores of k canaries in one run, each in or out by its own fair coin.

    Attributes:
      scores: (k,) finite; higher says "in".
      included: (k,) bool, how the coins fell. The bounds of one run hold only for independent fair coins.
      centred: whether the score of a canary that is out has the mean 0 by design. It has if the canary then sends
        nothing and its direction has a random sign: what was released does not know that sign.
    """

    scores: NDArray[np.float64]
    included: NDArray[np.bool_]
    centred: bool = False

    def __post_init__(self) -> None:
        _check("scores", self.scores)
        if self.included.shape != self.scores.shape or self.included.dtype != np.bool_:
            raise ValueError(f"included must be {self.scores.shape} bool (got {self.included.shape})")

    @property
    def seen(self) -> NDArray[np.float64]:
        """The scores of the canaries that were in."""
        return self.scores[self.included]

    @property
    def unseen(self) -> NDArray[np.float64]:
        """The scores of the canaries that were out."""
        return self.scores[~self.included]


@dataclass(frozen=True, eq=False)
class RepeatedScores:
    """The scores of one canary in many independent runs, some with it and some without.

    Attributes:
      seen: (n,) finite, of the runs with the canary; higher says "in".
      unseen: (m,) finite, of the runs without it.
    """

    seen: NDArray[np.float64]
    unseen: NDArray[np.float64]

    def __post_init__(self) -> None:
        _check("seen", self.seen)
        _check("unseen", self.unseen)


@dataclass(frozen=True)
class Releases:
    """What canaries are sent through.

    Attributes:
      rounds: how many releases.
      probability: with which a canary is in the cohort of one.
      noise_multiplier: of each.
      epsilon, delta: what is claimed of all together.
      repeated: whether one canary is released again and again, half of the times without it. Then the mean of the
        scores without it is fitted too: of canaries whose directions have random signs it is known to be 0.
      gaussian: whether the noise is Gaussian: if not, nothing is fitted.
    """

    rounds: int
    probability: float
    noise_multiplier: float
    epsilon: float
    delta: float
    repeated: bool = False
    gaussian: bool = True

    def shift(self, share: float) -> float:
        """By how many standard deviations canaries that are in and out differ if the noise is `share` of its size.

        A canary that is in adds rounds * q of its own length on the average, with the variance rounds * q (1 - q); the
        noise adds rounds * (share * z)^2 to each canary. In is as likely as out, so half of the former counts.
        """
        added, noise = self.rounds * self.probability, self.rounds * (share * self.noise_multiplier) ** 2
        return added / math.sqrt(noise + added * (1 - self.probability) / 2)


@dataclass(frozen=True)
class Observation:
    """The scores from one release, or from all releases of a run, and what is claimed of exactly these releases.

    Attributes:
      name: "round 3", or "run" for all releases together.
      claim: of the ledger, for these releases.
      scores: of one run with many canaries, or of many runs with one.
    """

    name: str
    claim: Claim
    scores: CanaryScores | RepeatedScores


@dataclass(frozen=True)
class Experiment:
    """Everything an audit observed.

    Attributes:
      mechanism: what was audited, in words, for instance "user level".
      observations: at least one; the last is of the whole run.
      settings: name to value, as they are shown and written to audit.json.
      releases: what the canaries of the whole run were sent through, which says what can be found. If their noise is
        not Gaussian, statistics that assume so are left out.
    """

    mechanism: str
    observations: tuple[Observation, ...]
    settings: dict[str, str | int | float | bool]
    releases: Releases

    def __post_init__(self) -> None:
        if not self.observations:
            raise ValueError("observations must hold at least that of the run")
        bad = [name for name, value in self.settings.items() if isinstance(value, float) and not math.isfinite(value)]
        if bad:
            raise ValueError(f"settings must be finite (got {', '.join(bad)})")


def _check(name: str, values: NDArray[np.float64]) -> None:
    if values.ndim != 1 or values.dtype != np.float64 or not np.isfinite(values).all():
        raise ValueError(f"{name} must be a vector of finite float64 (got {values.dtype}, {values.shape})")
