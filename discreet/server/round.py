"""One round of DP-FedAvg with an adaptive clip norm: the algorithm, pure.

Source: McMahan et al. 2018 (arXiv 1710.06963), Algorithm 1; Andrew et al. 2021 (arXiv 1905.03871), Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from discreet.mechanisms.mechanism import Kept, PlainSum, Released, Round, ServerRelease, expected_cohort
from discreet.mechanisms.sums import AnswerRelease, AnswerSum, Replies
from discreet.privacy.randomness import RandomSource
from discreet.privacy.sampling import fixed_size_cohort, in_turn, poisson_cohort
from discreet.server import server_optimizer
from discreet.server.noise_outlook import noise_ratio
from discreet.server.plan import Plan
from discreet.server.server_optimizer import ServerOptimizer
from discreet.server.state import State

if TYPE_CHECKING:
    from dp_accounting import DpEvent


@dataclass(frozen=True)
class CohortSampling:
    """The sampling of a cohort.

    kind: `poisson`: each member with `probability`, independently; `fixed`: that share of `population_size` places
    without replacement, of which only the connected ones can be asked; `everyone`; `cyclic`: one of `groups` groups,
    one after the other. `population_size` is a public constant.
    """

    kind: str
    probability: float
    population_size: int
    groups: int = 1

    def draw(self, members: Sequence[int], source: RandomSource, *, number: int = 1) -> list[int]:
        """The cohort of round `number`, from 1 on, of the connected members; may be empty.

        Raises:
          ValueError: more members than `population_size`: what is accounted would not be what runs.
        """
        if len(members) > self.population_size:
            raise ValueError(
                f"sampling.population_size={self.population_size}, but {len(members)} clients are connected: delta, "
                "the denominator and the account are those of the declared population"
            )
        if self.kind in ("everyone", "cyclic"):
            return [member for member in members if in_turn(member, number, groups=self.groups)]
        if self.kind == "poisson":
            return poisson_cohort(members, self.probability, source)
        # Absent clients are drawn too and then missed: each one's chance stays cohort_size / population_size.
        places = range(self.population_size)
        chosen = fixed_size_cohort(places, round(self.probability * self.population_size), source)
        return [members[place] for place in chosen if place < len(members)]


@dataclass(frozen=True)
class RoundSettings:
    """A round's public constants. `release`: the server's part of the mechanism that protects it. `answers`: how the
    answers to a query are released; None in rounds that ask for none. `kept`: by the mechanism, from round to round.
    `charged`: the last round that a ledger was charged for when this process began."""

    expected_cohort: float
    optimizer: ServerOptimizer
    release: ServerRelease
    answers: AnswerRelease | None = None
    kept: Kept = field(default_factory=Kept)
    charged: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.expected_cohort) and self.expected_cohort > 0):
            raise ValueError(f"expected_cohort must be finite and above 0 (got {self.expected_cohort})")

    def event_of(self, number: int) -> DpEvent | None:
        """The event of round `number`."""
        return self.release.event_of(number, rates=self.answers is not None, again=number <= self.charged)

    def of_round(self, state: State, source: RandomSource, charge: Callable[[DpEvent], None]) -> Round:
        """The facts that the release of the round after `state` needs."""
        facts = state.round, state.params.numel(), state.clip_norm, self.expected_cohort
        answers = AnswerSum(self.answers) if self.answers else None
        return Round(*facts, source, charge, answers, self.kept, again=state.round < self.charged)


def cohort_sampling(plan: Plan) -> CohortSampling:
    """The sampling of a run's cohorts."""
    user = plan.run.user
    return CohortSampling(user.sampling, user.probability, user.population_size, user.groups)


def round_settings(plan: Plan, *, answers: AnswerRelease | None = None) -> RoundSettings:
    """A round's public constants. `answers`: how answers are released, for rounds in which clients also rate."""
    return RoundSettings(expected_cohort(plan.run), plan.optimizer, plan.mechanism or PlainSum(), answers)


def dp_fedavg_round(
    state: State,
    replies: Replies,
    settings: RoundSettings,
    *,
    source: RandomSource,
    charge: Callable[[DpEvent], None],
) -> tuple[State, Released]:
    """Releases what one cohort has sent, and applies it. Returns the state after, and what was released.

    Args:
      replies: consumed as they come, each update clipped here unless it is a part of this very sum. May be empty: then
        the round releases noise alone. Under secure aggregation the one sum that nobody has read.
      source: of the noise.
      charge: called with the round's event before noise is added to anything: it writes the ledger to disk.

    Raises:
      RoundAbandoned: too few clients are left to open a sum. It is charged all the same.
    """
    release, cohort, energy = settings.release, settings.expected_cohort, 0.0
    released = release.release(replies, settings.of_round(state, source, charge))
    # The server's optimizer sees no more than the noised mean.
    change = (released.total / cohort).to(state.params.dtype)
    if release.sum_noise and getattr(settings.optimizer, "shrink_with_noise", False):
        ratio = noise_ratio(release.sum_noise, num_params=state.params.numel(), expected_cohort=cohort)
        energy = (release.norm(state.clip_norm) * ratio) ** 2  # the expected squared norm of the noise in the mean
    after = server_optimizer.apply(settings.optimizer, state, change, noise_energy=energy)
    return replace(after, clip_norm=released.clip_norm), released
