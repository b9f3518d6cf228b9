"""The sum of a cohort's answers to a query: clipped, added up, and released with noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from discreet.mechanisms.mechanism import AnswerNoise as OwnNoise
from discreet.mechanisms.mechanism import expected_cohort
from discreet.mechanisms.mechanism_table import own_noise
from discreet.mechanisms.sums import PartialReply, Replies, Reply, take_all
from discreet.privacy.clipping import ClippedSum, GridSum
from discreet.privacy.grid import grid_for
from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.randomness import RandomSource
from discreet.queries.query import Query, Sums
from discreet.server.plan import Plan
from discreet.settings.privacy import PRIVACY_DRAWS

if TYPE_CHECKING:
    from dp_accounting import DpEvent

SENSITIVITY = 1.0  # the L2 norm that an answer is clipped to


@dataclass(frozen=True)
class AnswerNoise:
    """The release of the sum of a cohort's answers, noised at the server or by each client.

    Attributes:
      length: of an answer before it is noised.
      expected_cohort: q * population_size, a public constant.
      noise_multiplier: of the noise on the sum, over `SENSITIVITY`, or of each client's; 0 protects nobody.
      draws, on_grid, largest_cohort: as `discreet.mechanisms.central_gaussian.UserPrivacy` has them.
      probability: q, with which a client is asked.
      own: the noise that each client draws on its own answer; None if the server noises the sum.
    """

    length: int
    expected_cohort: float
    noise_multiplier: float
    draws: int = 1
    on_grid: bool = False
    largest_cohort: int = 2**20
    probability: float = 1.0
    own: OwnNoise | None = None

    @property
    def sent(self) -> int:
        """The count of numbers that a client sends: the answer, and the variance of its own noise."""
        return self.length + (self.own is not None)

    @property
    def stddev(self) -> float:
        """Of the noise on each number of the sum; with clients' own noise as expected if each answer is about one
        example: about m examples it is an m-th of that."""
        unit = SENSITIVITY if self.own is None else self.own.unit * math.sqrt(self.expected_cohort)
        return self.noise_multiplier * unit

    def empty(self) -> AnswerSum:
        """A sum of no answers."""
        return AnswerSum(self)

    def opened(self, values: Tensor) -> Sums:
        """A sum (sent,) that has its noise. If nobody has answered with noise of its own, all is unknown."""
        numbers, stddev = values.tolist(), self.stddev
        if self.own is not None:
            *numbers, variance = numbers
            stddev = math.sqrt(variance) if variance else math.inf
        return Sums(tuple(numbers), self.expected_cohort, stddev, self.probability)


class AnswerSum:
    """Adds up answers.

    Guarantee of those that the server noises: adding or removing one client moves the sum by at most `SENSITIVITY` in
    L2, whatever it answers, as `ClippedSum` and `GridSum` state it. An answer that is missing adds zero. Answers that
    clients have noised are added up as they are: that is post-processing of what they released.
    """

    def __init__(self, how: AnswerNoise) -> None:
        self.how, self.opened = how, how.opened
        self.rows: ClippedSum | GridSum = ClippedSum(how.sent, SENSITIVITY)
        if how.on_grid:
            grid = grid_for(SENSITIVITY, how.sent, largest_cohort=how.largest_cohort, noise_scale=how.stddev)
            self.rows = GridSum(how.sent, SENSITIVITY, grid=grid)

    def add(self, answers: Tensor) -> None:
        """Adds clients: answers (n, how.sent). One with own noise that is not finite, or has no variance, adds zero."""
        if self.how.own is None:
            self.rows.add(answers)
            return
        rows = answers.detach().cpu().double()
        self._values.add_(rows[rows.isfinite().all(dim=1) & (rows[:, -1] >= 0)].sum(dim=0))

    def take(self, reply: Reply | PartialReply) -> None:
        """Adds a client's answer, if it has sent one, or the sum of a part."""
        if isinstance(reply, PartialReply):
            if reply.answers:
                self._values.add_(torch.tensor(reply.answers, dtype=self._values.dtype))
        elif reply.answer is not None:
            self.add(reply.answer.unsqueeze(0))

    def part(self) -> tuple[float, ...]:
        """The values added so far, for another sum to take in."""
        return tuple(self._values.tolist())

    def released(self, source: RandomSource) -> Sums:
        """The sum with noise, which is drawn from `source` unless clients have drawn it."""
        if self.how.own is not None:
            return self.opened(self._values)
        return self.opened(self.rows.noised(Gaussian(self.how.noise_multiplier, draws=self.how.draws), source))

    @property
    def _values(self) -> Tensor:
        return self.rows.steps if isinstance(self.rows, GridSum) else self.rows.total


def answer_round(
    replies: Replies,
    how: AnswerNoise,
    *,
    event: DpEvent,
    source: RandomSource,
    charge: Callable[[DpEvent], None],
) -> Sums:
    """The noised sum of the answers of a cohort that is asked for nothing else. `charge` writes the ledger to disk
    before noise is added to anything.

    Guarantee: that of `AnswerSum`, noised as one Gaussian mechanism of `how.noise_multiplier`, sampled as `event` says.
    Noise and denominator are functions of public constants alone: not of who replied.
    """
    total = AnswerSum(how)
    take_all(replies, None, total)
    charge(event)
    return total.released(source)


def _server_noise(plan: Plan, length: int, *, expected_cohort: float, noise_multiplier: float) -> AnswerNoise:
    """The noise of a run's server on a sum of answers of so many numbers, drawn as that on updates."""
    return AnswerNoise(
        length,
        expected_cohort,
        noise_multiplier,
        draws=PRIVACY_DRAWS.get(plan.run.noise, 1),
        on_grid=plan.run.noise == "grid",
        largest_cohort=plan.run.user.population_size,
    )


def statistics_noise(plan: Plan, length: int) -> AnswerNoise:
    """The release of the sum of all clients' answers of `length` numbers about their data."""
    everybody = float(plan.run.user.population_size)
    return _server_noise(plan, length, expected_cohort=everybody, noise_multiplier=plan.run.statistics.noise_multiplier)


def answers_of(plan: Plan, query: Query) -> AnswerNoise:
    """The release of answers to a query: noised at the server, or by each client."""
    run, own = plan.run, own_noise(plan.run, query.l1_norm)
    noise = _server_noise(
        plan, query.length, expected_cohort=expected_cohort(run), noise_multiplier=run.evaluation.noise_multiplier
    )
    return replace(noise, probability=run.user.probability, own=own, on_grid=noise.on_grid and own is None)
