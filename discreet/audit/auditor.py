"""What an auditor of user-level privacy sees of a run, release by release, and the scores that it gives canaries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from discreet.audit.canaries import Canaries
from discreet.federated.round import CohortSum, RoundSettings
from discreet.federated.server_optimizer import ServerSGD
from discreet.federated.state import State
from discreet.privacy.quantile import BIT_SENSITIVITY

Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Unscored:
    """No test set is looked at: an audit asks nothing of the model."""

    loss: float | None = None
    scores: Mapping[str, float | None] = field(default_factory=dict)


class Auditor:
    """Scores the canaries by what each round releases; to be told of checkpoints and rows as a run writes them.

    A score is the sum over releases of the inner product of what a canary would add and what was released, over the
    variance of the noise: the log-likelihood ratio of in and out, up to constants, if every member takes part, and its
    best linear stand-in if cohorts are sampled.

    Args:
      others: what honest clients have sent in the last round, as the auditor knows it.
      start: before the first round.
    """

    def __init__(
        self, settings: RoundSettings, canaries: Canaries, others: Callable[[], CohortSum], start: State
    ) -> None:
        assert settings.user is not None
        self.settings, self.user, self.canaries, self.others = settings, settings.user, canaries, others
        self.before, self.after = start, start
        self.rounds: list[Scores] = []

    def evaluate(self, after: State) -> Unscored:
        """Takes down the state after a round."""
        self.before, self.after = self.after, after
        return Unscored()

    def row(self, row: Mapping[str, object]) -> None:
        """Scores the round that a row of metrics.csv is of."""
        others = self.others()
        scores = self._of_update(others)
        fraction = row["fraction_below"]
        # One that was clamped to 0 or 1 hides the count.
        if isinstance(fraction, float) and 0 < fraction < 1:
            scores = scores + self._of_count(fraction, others)
        self.rounds.append(scores)

    def _of_update(self, others: CohortSum) -> Scores:
        released = noised_sum(self.settings, self.before, self.after) - _in_units(others)
        clip_norm, noise = self.before.clip_norm, self.user.update_noise_multiplier
        return self.canaries.along(released) / (clip_norm * noise**2)

    def _of_count(self, fraction: float, others: CohortSum) -> Scores:
        assert self.user.count_stddev is not None
        released = (fraction - 0.5) * self.settings.expected_cohort - BIT_SENSITIVITY * others.below
        signs: Scores = np.where(self.canaries.bits, BIT_SENSITIVITY, -BIT_SENSITIVITY)
        return signs * released / self.user.count_stddev**2


def noised_sum(settings: RoundSettings, before: State, after: State) -> Tensor:
    """What a round released of its updates, (num_params,) float64, from the first moment of the server's optimizer."""
    optimizer = settings.optimizer
    keep, share = (
        (optimizer.momentum, 1.0) if isinstance(optimizer, ServerSGD) else (optimizer.beta_1, 1 - optimizer.beta_1)
    )
    return (after.velocity.double() - keep * before.velocity.double()) * (settings.expected_cohort / share)


def _in_units(total: CohortSum) -> Tensor:
    values = total.part().values
    return values if total.grid is None else values.double() * total.grid.step
