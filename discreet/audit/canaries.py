"""Canaries: units that an audit includes in a mechanism or leaves out, each by its own fair coin;
their scores, and the privacy claim that is tested."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.fft import dct, idct
from torch import Tensor

from discreet.accounting.privacy_ledger import PrivacyLedger
from discreet.mechanisms.central_gaussian import noise_of, update_noise_multiplier
from discreet.planning.plan import Plan
from discreet.planning.server_optimizer import ServerAdam, ServerSGD, ServerYogi
from discreet.planning.state import State
from discreet.privacy.quantile import BIT_SENSITIVITY
from discreet.privacy.randomness import RandomSource
from discreet.settings.rules import ConfigError

Facts = Mapping[str, str | int | float | bool]


@dataclass(frozen=True, eq=False)
class Canaries:
    """k canaries, whose directions are k rows of one random orthonormal basis of the updates.

    The basis is the discrete cosine transform of a vector whose signs were flipped at random. Its
    rows have no preferred direction, are orthogonal, and need no memory: all inner products with a
    vector are one transform.

    Attributes:
      signs: (num_params,) float64 of -1 and 1, the flipped signs.
      rows: (k,) int64, the rows of the basis that are used.
      bits: (k,) bool, the norm bit that each canary sends.
      included: (k,) bool, the results of the coins.
    """

    signs: NDArray[np.float64]
    rows: NDArray[np.int64]
    bits: NDArray[np.bool_]
    included: NDArray[np.bool_]

    def direction(self, index: int) -> Tensor:
        """The unit vector of a canary, (num_params,), float64."""
        one = np.zeros(len(self.signs))
        one[self.rows[index]] = 1.0
        return torch.from_numpy(self.signs * idct(one, norm="ortho"))

    def along(self, vector: Tensor) -> NDArray[np.float64]:
        """The inner product of each canary's direction with `vector` (num_params,): (k,)."""
        products: NDArray[np.float64] = dct(self.signs * vector.double().numpy(), norm="ortho")[
            self.rows
        ]
        return products


def draw_canaries(count: int, num_params: int, source: RandomSource) -> Canaries:
    """Canaries with random directions, random bits and fair coins. Raises ConfigError if there are
    fewer directions than canaries."""
    if not 1 <= count <= num_params:
        raise ConfigError(
            f"--canaries must be within 1 .. {num_params}, the number of parameters (got {count})"
        )
    rows = source.child("rows").permutation(num_params)[:count].numpy()
    numbers = {"signs": num_params, "bits": count, "coins": count}
    signs, bits, coins = (
        source.child(name).words(number) % 2 == 1 for name, number in numbers.items()
    )
    return Canaries(np.where(signs, 1.0, -1.0), rows, bits, coins)


@dataclass(frozen=True, eq=False)
class Canary:
    """A single canary. `added`: its contribution to the sum of updates, (num_params,) float64, in
    units of the clip norm."""

    added: Tensor
    bit: bool = False

    @property
    def bits(self) -> NDArray[np.bool_]:
        """The bit as in `Canaries`, (1,)."""
        return np.array([self.bit])

    def along(self, vector: Tensor) -> NDArray[np.float64]:
        """The inner product of its contribution with `vector` (num_params,): (1,)."""
        return np.array([float(vector.double() @ self.added)])


@dataclass(frozen=True, eq=False)
class Auditor:
    """Scores canaries by a round's noised sum of updates and noised count of bits. A score is the
    inner product of the canary's contribution and the release, over the variance of the noise. Up
    to constants this is the log-likelihood ratio of in and out if every member takes part, and its
    best linear approximation if cohorts are sampled."""

    plan: Plan
    canaries: Canaries | Canary

    def scores(
        self,
        total: Tensor,
        clip_norm: float,
        fraction: object,
        *,
        known: Tensor | float = 0.0,
        below: int = 0,
    ) -> NDArray[np.float64]:
        """The scores of a round with this clip norm, (k,), from its noised sum of updates `total`.
        `fraction`: the released share of norms below the clip norm, if there is one. `known`,
        `below`: the sums of honest clients' updates and of their centred bits, in halves, which the
        auditor knows.
        """
        expected = self.plan.mechanism.expected_noise(clip_norm)
        counted = expected.count_stddev
        noise = expected.multiplier
        if counted is not None:  # the accounted noise of the update
            noise = update_noise_multiplier(noise_of(self.plan.run), count_stddev=counted)
        scores = self.canaries.along(total.double() - known) / (expected.norm * noise**2)
        # A fraction that was clamped to 0 or 1 hides the count.
        if counted is None or not isinstance(fraction, float) or not 0 < fraction < 1:
            return scores
        count = (fraction - 0.5) * self.plan.denominator / BIT_SENSITIVITY - below
        variance = (counted / BIT_SENSITIVITY) ** 2
        return scores + np.where(self.canaries.bits, count, -count) / variance


def noised_sum(plan: Plan, before: State, after: State) -> Tensor:
    """The release of a round's updates, (num_params,) float64, from the first moment of the
    server's optimizer."""
    optimizer = plan.optimizer
    if isinstance(optimizer, ServerSGD):
        keep = optimizer.momentum
        share = 1.0
    elif isinstance(optimizer, ServerAdam | ServerYogi):
        keep = optimizer.beta_1
        share = 1 - keep
    else:
        raise ConfigError("server.optimizer must be sgd, adam or yogi in an audit")
    return (after.velocity.double() - keep * before.velocity.double()) * (plan.denominator / share)


@dataclass(frozen=True)
class Claim:
    """The guarantee that a ledger states for the scored releases; `adjacency` is in words."""

    epsilon: float
    delta: float
    adjacency: str

    @classmethod
    def of(cls, plan: Plan, guarantee: str, spent: PrivacyLedger) -> Self:
        """The claim of a ledger, at the delta and by the accountant of a run."""
        adjacency = next(each.adjacency for each in plan.guarantees if each.name == guarantee)
        return cls(spent.epsilon(plan.run.delta, plan.run.accountant), plan.run.delta, adjacency)


@dataclass(frozen=True, eq=False)
class Scores:
    """One score for each canary of a run, or for each of many releases of one canary.

    Attributes:
      values: (k,) float64, finite; a higher score says "in".
      included: (k,) bool, true if the canary was in. The bounds of one run hold only for
        independent fair coins.
      centred: True if the score of a canary that is out has mean 0 by design: if the canary then
        sends nothing and its direction has a random sign, on which the release does not depend.
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
    """The audited releases: `rounds` of them, to which `claim` applies.

    Attributes:
      probability: the probability that a canary is in the cohort of a release.
      noise_multiplier: of each release; None if the noise is not Gaussian, so that nothing is
        fitted.
      repeated: True if the release of one canary is repeated, half of the times without it. Then
        the mean of the scores without it is fitted too; for canaries whose directions have random
        signs it is known to be 0.
    """

    rounds: int
    probability: float
    noise_multiplier: float | None
    claim: Claim
    repeated: bool = False

    def shift(self, share: float) -> float:
        """The distance between the means of in and out, in standard deviations, if the noise has
        `share` of its size. A canary that is in adds rounds * q times its length on average, with
        variance rounds * q (1 - q); the noise adds the variance rounds * (share * z)^2 to every
        canary. In and out are equally likely, so half of the former variance counts."""
        assert self.noise_multiplier is not None
        added = self.rounds * self.probability
        noise = self.rounds * (share * self.noise_multiplier) ** 2
        return added / math.sqrt(noise + added * (1 - self.probability) / 2)


@dataclass(frozen=True)
class Observation:
    """The scores from one release ("round 3"), or from all releases of a run ("run"), and the claim
    for exactly these."""

    name: str
    claim: Claim
    scores: Scores


@dataclass(frozen=True)
class Experiment:
    """Everything that an audit observed. The last observation, and `releases`, are those of the
    whole run. The settings are written to audit.json."""

    mechanism: str
    observations: tuple[Observation, ...]
    settings: Facts
    releases: Releases


def observed(rounds: Sequence[tuple[Claim, Scores]], run: Claim) -> tuple[Observation, ...]:
    """An observation for each round, and one for the run: each canary's scores added up over all
    rounds."""
    total = np.sum([scores.values for _, scores in rounds], axis=0)
    named = [Observation(f"round {number}", *each) for number, each in enumerate(rounds, 1)]
    return (*named, Observation("run", run, replace(rounds[-1][1], values=total)))
