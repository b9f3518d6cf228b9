"""One round of DP-FedAvg with an adaptive clip norm: the algorithm, pure.

Source: McMahan et al. 2018 (arXiv 1710.06963), Algorithm 1; Andrew et al. 2021 (arXiv 1905.03871), Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from discreet.federated import server_optimizer
from discreet.federated.answer_sum import AnswerNoise, AnswerSum, NoisedAnswers, NoisedByClients, sum_for
from discreet.federated.partial_reply import PartialReply
from discreet.federated.query import Sums
from discreet.federated.server_optimizer import ServerOptimizer
from discreet.federated.state import State
from discreet.privacy.clipping import ClippedSum, GridSum
from discreet.privacy.grid import Grid, grid_for
from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.noise_ratio import noise_ratio
from discreet.privacy.quantile import BIT_SENSITIVITY, LARGEST_NUMBER, QuantileEstimator, split_noise_multiplier
from discreet.privacy.randomness import RandomSource
from discreet.privacy.sampling import fixed_size_cohort, poisson_cohort
from discreet.privacy.secure_grid import SecureSum
from discreet.settings.privacy import EXAMPLE, USER

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from discreet.federated.messages import TrainReply


@dataclass(frozen=True)
class CohortSampling:
    """How a cohort is drawn.

    Attributes:
      kind: `poisson`: each member with `probability`, independently; `fixed`: that share of `population_size` places
        without replacement, of which only the connected ones can be asked; `everyone`.
      probability: of the Poisson cohort.
      population_size: a public constant.
    """

    kind: str
    probability: float
    population_size: int

    def draw(self, members: Sequence[int], source: RandomSource) -> list[int]:
        """A round's cohort of the connected members; may be empty.

        Raises:
          ValueError: more members than `population_size`: what is accounted would not be what runs.
        """
        if len(members) > self.population_size:
            raise ValueError(
                f"sampling.population_size={self.population_size}, but {len(members)} clients are connected: delta, "
                "the denominator and the account are those of the declared population"
            )
        if self.kind == "everyone":
            return list(members)
        if self.kind == "poisson":
            return poisson_cohort(members, self.probability, source)
        # Absent clients are drawn too and then missed: each one's chance stays cohort_size / population_size.
        places = range(self.population_size)
        chosen = fixed_size_cohort(places, round(self.probability * self.population_size), source)
        return [members[place] for place in chosen if place < len(members)]


class CohortSum:
    """Clips updates to `clip_norm` and adds them up, beside their bits.

    Guarantee: adding or removing one client moves the sum by at most `clip_norm` in L2 and `below` by one half, as
    `ClippedSum` and `GridSum` state it, however the cohort is cut into parts: on the grid sums are exact, and in
    float64 their order changes only the last bits.
    """

    def __init__(self, num_params: int, clip_norm: float, grid: Grid | None) -> None:
        self.clip_norm, self.grid = clip_norm, grid
        self.clipped = ClippedSum(num_params, clip_norm) if grid is None else GridSum(num_params, clip_norm, grid=grid)
        self.below, self.replies = 0, 0

    def add(self, updates: Tensor, below: Tensor) -> None:
        """Adds clients: updates (n, num_params), bits (n,)."""
        # Clipped again: nobody's clipping is trusted.
        self.clipped.add(updates)
        self.replies += len(updates)
        self.below += 2 * int(below.sum()) - len(below)

    def take(self, reply: TrainReply | PartialReply) -> None:
        """Adds a client, or a part."""
        if isinstance(reply, PartialReply):
            self.merge(reply)
        else:
            self.add(reply.update.unsqueeze(0), torch.tensor([reply.below]))

    def merge(self, part: PartialReply) -> None:
        """Adds a part.

        Raises:
          ValueError: it was clipped otherwise, or is of another model.
        """
        values = self._values
        ours, theirs = (self.clip_norm, self.grid, values.shape), (part.clip_norm, part.grid, part.values.shape)
        if ours != theirs or values.dtype != part.values.dtype:
            raise ValueError(f"a part must have the clip norm, the grid and the shape {ours}, not {theirs}")
        values.add_(part.values)
        self.replies += part.replies
        self.below += part.below

    def part(self) -> PartialReply:
        """What has been added up, to be merged into another sum. Not a copy."""
        return PartialReply(self._values, self.below, self.replies, self.clip_norm, self.grid)

    @property
    def _values(self) -> Tensor:
        return self.clipped.total if isinstance(self.clipped, ClippedSum) else self.clipped.steps


@dataclass(frozen=True)
class UserPrivacy:
    """How a round is made private for a whole client.

    Attributes:
      noise_multiplier: z, of the round as a whole (update and bits together); 0 draws no noise and protects nobody.
      event: what a round costs.
      count_stddev: of the noise on the count; None with a fixed clip norm, which uses no bits.
      target_quantile, clip_learning_rate, clip_max: of the adaptive clip norm, which never passes the last of them.
      clip_search_rate: a further learning rate in the first round, halved in each one after it.
      draws: Gaussian draws summed for each noise value, see `mechanisms.Gaussian`.
      on_grid: whether updates are put on an integer grid and summed exactly, see `privacy.grid`.
      largest_cohort: how many updates a sum on the grid must be able to hold.
    """

    noise_multiplier: float
    event: DpEvent
    count_stddev: float | None = None
    target_quantile: float = 0.5
    clip_learning_rate: float = 0.2
    clip_max: float = LARGEST_NUMBER
    clip_search_rate: float = 0.0
    draws: int = 1
    on_grid: bool = False
    largest_cohort: int = 2**20

    @property
    def update_noise_multiplier(self) -> float:
        """z_update, see `update_noise_multiplier`."""
        return update_noise_multiplier(self.noise_multiplier, count_stddev=self.count_stddev)


def update_noise_multiplier(noise_multiplier: float, *, count_stddev: float | None) -> float:
    """z_update: so that update and bits together are one Gaussian of multiplier z; z itself if there are no bits."""
    if count_stddev is None or noise_multiplier == 0:
        return noise_multiplier
    return split_noise_multiplier(noise_multiplier, count_stddev=count_stddev)


@dataclass(frozen=True)
class RoundSettings:
    """A round's public constants. `user` is None if user-level privacy is off: no clip, no noise, no bits. `answers`:
    how the answers to a query are released; None in rounds that ask for none. `user.event` is then that of update, bits
    and answers together. Answers that clients have noised themselves go with `user` None. `secure`: what clients add up
    under secure aggregation (`discreet.federated.secure_round`); None without. `norm`: what one step of that sum is a
    share of, if that is not the adaptive clip norm."""

    expected_cohort: float
    optimizer: ServerOptimizer
    user: UserPrivacy | None
    answers: AnswerNoise | NoisedByClients | None = None
    secure: SecureSum | None = None
    norm: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.expected_cohort) and self.expected_cohort > 0):
            raise ValueError(f"expected_cohort must be finite and above 0 (got {self.expected_cohort})")

    def clip_norm_of(self, state: State) -> float:
        """What bounds a client's part in the sum of a round."""
        return state.clip_norm if self.norm is None else self.norm

    @property
    def charged(self) -> tuple[str, DpEvent] | None:
        """The guarantee that a round's release is charged to, and its event; None if the server's account has none."""
        if self.user is not None:
            return USER, self.user.event
        return None if self.secure is None else (EXAMPLE, self.secure.event)

    @property
    def noise_multiplier(self) -> float:
        """Of the noise that is expected in the sum. Under secure aggregation all clients add their share, and there is
        more than what is accounted for those that are sure to."""
        if self.secure is not None:
            return self.secure.own_noise_stddev * math.sqrt(self.secure.nodes)
        return self.user.update_noise_multiplier if self.user is not None else 0.0


@dataclass(frozen=True)
class RoundMetrics:
    """What may be said of a round.

    Attributes:
      clip_norm: the norm that clipped this round.
      fraction_below: the noised fraction of update norms at or below it; None without an adaptive clip norm.
      replies: how many updates were added up. Who takes part is not covered by the guarantee.
      answers: the noised sum of the answers to a query; None in a round without one.
    """

    clip_norm: float
    fraction_below: float | None
    replies: int
    answers: Sums | None = None


def dp_fedavg_round(
    state: State,
    replies: Iterable[TrainReply | PartialReply],
    settings: RoundSettings,
    *,
    source: RandomSource,
    charge: Callable[[DpEvent], None],
) -> tuple[State, RoundMetrics]:
    """Clips, adds up, noises and applies the updates of one cohort.

    Guarantee (`settings.user` given): for neighbouring cohorts that differ in one client, the sum before noise differs
    by at most C_t in L2 and the centred count by at most 1/2, whatever that client sends. Both are noised together as
    one Gaussian mechanism of multiplier z, sampled as `settings.user.event` says. Noise and denominator are functions
    of public constants and C_t alone: not of who replied. With `settings.answers` the sum of the answers, which differs
    by at most 1, is part of the same mechanism, of multiplier (z^-2 + z_answers^-2)^(-1/2).

    Args:
      replies: consumed as they come, each update clipped here unless it is a part of this very sum. May be empty: then
        the round releases noise alone.
      source: of the noise.
      charge: called with the round's event before noise is added to anything: it writes the ledger to disk.
    """
    user = settings.user
    cohort = empty_sum(state.params.numel(), state.clip_norm, user)
    answers = sum_for(settings.answers) if settings.answers else None
    for reply in replies:
        cohort.take(reply)
        if answers:
            answers.take(reply)
    if user is None:
        own = answers.released() if isinstance(answers, NoisedAnswers) else None
        return server_step(state, cohort.clipped.total, settings), RoundMetrics(
            state.clip_norm, None, cohort.replies, own
        )
    charge(user.event)
    released = answers.released(source.child("answer")) if isinstance(answers, AnswerSum) else None
    # Noise before the clip norm moves: C_t, not C_{t+1}, bounded this sum.
    mechanism = Gaussian(user.update_noise_multiplier, draws=user.draws)
    after = server_step(state, cohort.clipped.noised(mechanism, source.child("update")), settings)
    if user.count_stddev is None:
        return after, RoundMetrics(state.clip_norm, None, cohort.replies, released)
    noised = _noised_count(cohort.below, user, source.child("count"))
    estimator, fraction = norm_estimator(state, settings).update(noised, expected_cohort=settings.expected_cohort)
    metrics = RoundMetrics(state.clip_norm, fraction, cohort.replies, released)
    return replace(after, clip_norm=estimator.estimate), metrics


def server_step(state: State, total: Tensor, settings: RoundSettings) -> State:
    """The server's optimizer, which sees no more than the noised mean."""
    change = (total / settings.expected_cohort).to(state.params.dtype)
    return server_optimizer.apply(settings.optimizer, state, change, noise_energy=_noise_energy(state, settings))


def empty_sum(num_params: int, clip_norm: float, user: UserPrivacy | None) -> CohortSum:
    """The sum that a round starts with."""
    if user is None or not user.on_grid:
        return CohortSum(num_params, clip_norm, None)
    noise_scale = user.update_noise_multiplier * clip_norm
    grid = grid_for(clip_norm, num_params, largest_cohort=user.largest_cohort, noise_scale=noise_scale)
    return CohortSum(num_params, clip_norm, grid)


def norm_estimator(state: State, settings: RoundSettings) -> QuantileEstimator:
    """What moves the clip norm after a round with noised bits: a function of public constants and of the round."""
    user = settings.user
    assert user is not None
    assert user.count_stddev is not None
    # A run may be resumed with a lower ceiling than the clip norm that it has reached.
    return QuantileEstimator(
        min(state.clip_norm, user.clip_max),
        user.target_quantile,
        user.clip_learning_rate,
        user.clip_max,
        # Halved each round: a search that halves its interval, in the logarithm of the norm.
        search_rate=user.clip_search_rate * 0.5**state.round,
        doubt=2 * user.count_stddev / settings.expected_cohort,
    )


def _noise_energy(state: State, settings: RoundSettings) -> float:
    """The expected squared norm of a round's noise, on the average."""
    noise, size = settings.noise_multiplier, state.params.numel()
    if noise == 0:
        return 0.0
    ratio = noise_ratio(noise, num_params=size, expected_cohort=settings.expected_cohort)
    return (settings.clip_norm_of(state) * ratio) ** 2


def _noised_count(below: int, user: UserPrivacy, source: RandomSource) -> float:
    """The noised sum of (b - 1/2); `below` counts it in halves, so it is a whole number."""
    assert user.count_stddev is not None
    mechanism = Gaussian(user.count_stddev / BIT_SENSITIVITY, draws=user.draws)
    if user.on_grid:
        grid = grid_for(BIT_SENSITIVITY, 1, largest_cohort=user.largest_cohort, noise_scale=user.count_stddev)
        steps = torch.tensor([round(below * BIT_SENSITIVITY / grid.step)])
        noised = mechanism.add_grid_noise(steps, BIT_SENSITIVITY, grid=grid, source=source)
        return float(grid.to_float(noised, torch.float64)[0])
    total = torch.tensor([below * BIT_SENSITIVITY], dtype=torch.float64)
    return float(mechanism.add_noise(total, BIT_SENSITIVITY, source)[0])
