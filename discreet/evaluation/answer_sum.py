"""The sum of a cohort's answers to a query: clipped, added up, and released with noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from discreet.mechanisms.sums import PartialReply, Replies, Reply, take_all
from discreet.privacy.clipping import ClippedSum, GridSum
from discreet.privacy.grid import grid_for
from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.randomness import RandomSource
from discreet.queries.query import Sums

if TYPE_CHECKING:
    from dp_accounting import DpEvent


SENSITIVITY = 1.0  # the L2 norm that an answer is clipped to


@dataclass(frozen=True)
class AnswerNoise:
    """The release of the sum of a cohort's answers, noised at the server.

    Attributes:
      length: of an answer.
      expected_cohort: q * population_size, a public constant.
      noise_multiplier: of the noise on the sum, over `SENSITIVITY`; 0 draws no noise and protects nobody.
      probability: q, with which a client is asked.
      draws, on_grid, largest_cohort: as `discreet.mechanisms.central_gaussian.UserPrivacy` has them.
    """

    length: int
    expected_cohort: float
    noise_multiplier: float
    draws: int = 1
    on_grid: bool = False
    largest_cohort: int = 2**20
    probability: float = 1.0

    @property
    def sent(self) -> int:
        """The count of numbers that a client sends."""
        return self.length

    @property
    def stddev(self) -> float:
        """Of the noise on each coordinate of the sum."""
        return self.noise_multiplier * SENSITIVITY

    def empty(self) -> AnswerSum:
        """A sum of no answers."""
        return AnswerSum(self)

    def rows(self) -> ClippedSum | GridSum:
        """The sum that answers are added to: it clips them to `SENSITIVITY`."""
        if not self.on_grid:
            return ClippedSum(self.length, SENSITIVITY)
        grid = grid_for(SENSITIVITY, self.length, largest_cohort=self.largest_cohort, noise_scale=self.stddev)
        return GridSum(self.length, SENSITIVITY, grid=grid)

    def opened(self, values: Tensor) -> Sums:
        """A sum (length,) that has its noise."""
        return Sums(tuple(values.tolist()), self.expected_cohort, self.stddev, self.probability)


@dataclass(frozen=True)
class NoisedByClients:
    """The release of a sum of answers that each client has noised itself (`discreet.mechanisms.local_dp_sgd.OwnNoise`).

    Attributes:
      length: of an answer before it was noised.
      expected_cohort, probability: as `AnswerNoise` has them.
      noise_multiplier: of each client's noise, over what one of its examples can add to its answer, or with local
        privacy over how far other data can move it.
      unit: the standard deviation of that noise on each number, over `noise_multiplier`; an m-th about m examples.
      of_examples: whether the noise is for one of the examples, so that its size depends on their number.
    """

    length: int
    expected_cohort: float
    noise_multiplier: float
    probability: float = 1.0
    unit: float = 1.0
    of_examples: bool = True

    @property
    def sent(self) -> int:
        """The count of numbers that a client sends: the answer, and the variance of its noise."""
        return self.length + 1

    @property
    def stddev(self) -> float:
        """Of the noise on each coordinate of the sum of as many answers as are expected, if each is about one example;
        about m examples it is an m-th of that."""
        return self.noise_multiplier * self.unit * math.sqrt(self.expected_cohort)

    def empty(self) -> AnswerSum:
        """A sum of no answers."""
        return AnswerSum(self)

    def rows(self) -> NoisedRows:
        """The sum that answers are added to."""
        return NoisedRows(torch.zeros(self.sent, dtype=torch.float64))

    def opened(self, values: Tensor) -> Sums:
        """A sum (length + 1,), with the standard deviation of all noise that is in it: infinity if nobody has
        answered."""
        *sums, variance = values.tolist()
        stddev = math.sqrt(variance) if variance else math.inf
        return Sums(tuple(sums), self.expected_cohort, stddev, self.probability)


@dataclass(frozen=True, eq=False)
class NoisedRows:
    """Adds up answers that clients have noised themselves, each (length + 1,): the last number is the variance of the
    noise. Nothing is clipped: what the sum says is post-processing of what clients released. A row that can't be one,
    with a value that is not finite or a variance below 0, adds zero."""

    total: Tensor

    def add(self, answers: Tensor) -> None:
        """Adds clients: answers (n, length + 1)."""
        rows = answers.detach().cpu().double()
        self.total.add_(rows[rows.isfinite().all(dim=1) & (rows[:, -1] >= 0)].sum(dim=0))


class AnswerSum:
    """Adds up answers.

    Guarantee of those that the server noises: adding or removing one client moves the sum by at most `SENSITIVITY` in
    L2, whatever it answers, as `ClippedSum` and `GridSum` state it. An answer that is missing adds zero.
    """

    def __init__(self, how: AnswerNoise | NoisedByClients) -> None:
        self.how, self.rows = how, how.rows()

    def add(self, answers: Tensor) -> None:
        """Adds clients: answers (n, how.sent)."""
        self.rows.add(answers)

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
        if isinstance(self.how, NoisedByClients):
            return self.how.opened(self._values)
        assert not isinstance(self.rows, NoisedRows)
        mechanism = Gaussian(self.how.noise_multiplier, draws=self.how.draws)
        return self.how.opened(self.rows.noised(mechanism, source))

    def opened(self, values: Tensor) -> Sums:
        """A sum that has its noise."""
        return self.how.opened(values)

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
    """Clips, adds up and noises the answers of a cohort that is asked for nothing else.

    Guarantee: that of `AnswerSum`, noised as one Gaussian mechanism of `how.noise_multiplier`, sampled as `event` says.
    Noise and denominator are functions of public constants alone: not of who replied.

    Args:
      replies: consumed as they come; may be empty: then the release is noise alone.
      event: what it costs.
      source: of the noise.
      charge: called with the event before noise is added to anything: it writes the ledger to disk.
    """
    total = AnswerSum(how)
    take_all(replies, None, total)
    charge(event)
    return total.released(source)
