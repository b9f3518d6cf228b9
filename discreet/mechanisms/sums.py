"""The sums of clients' updates and answers to queries, in the process that adds them up and at the
server."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Union

import torch
from torch import Tensor

from discreet.mechanisms.round_state import Released
from discreet.privacy.clipping import ClippedSum
from discreet.privacy.grid import Grid, grid_for
from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.private import Private
from discreet.privacy.randomness import RandomSource
from discreet.settings.client_settings import ClientSettings
from discreet.settings.privacy import Sizes

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from discreet.mechanisms.client_noise import OwnNoise
    from discreet.mechanisms.round_state import RoundState
    from discreet.protocol.messages import TrainReply
    from discreet.queries.query import Sums

SENSITIVITY = 1.0  # the L2 norm that an answer is clipped to
NOT_OPENED = "a mechanism that reads replies was given a sum that is not opened"


@dataclass(frozen=True, eq=False, repr=False)
class PartialReply(Private):
    """The contribution of some clients to a round's sums, made by this process or by one forked
    from it.

    It never arrives in a message. It is added unchanged, whereas an update that a client sends is
    clipped again.

    Attributes:
      values: (num_params,), the clipped updates' sum: float64, or int64 in steps of the grid. Under
        secure aggregation the sum of the clients' noised vectors, int64 (length,), as `SecureSum`
        has them.
      below: the centred bits' sum, in halves.
      replies: the number of clients.
      clip_norm, grid: the clip norm of the updates, and their grid (None: floating point).
      answers: the answers' sum, as `AnswerSum.part` has it; empty if no query was asked.
      epsilon_example, epsilon_local, epsilon_local_pure: the largest over these clients, by their
        own accounts.
    """

    values: Tensor
    below: int
    replies: int
    clip_norm: float
    grid: Grid | None = None
    answers: tuple[float, ...] = ()
    epsilon_example: float = 0.0
    epsilon_local: float = 0.0
    epsilon_local_pure: float = 0.0

    @property
    def in_floats(self) -> Tensor:
        """The sum of the updates, float64."""
        if self.grid is None:
            return self.values
        return self.values.double() * self.grid.step


@dataclass(frozen=True, eq=False)
class UnopenedSum:
    """A sum of clients' noised vectors that has not been read.

    Attributes:
      open: reads it: the noised total, int64 (length,), centred as `SecureSum.centred` has it. It
        raises `RoundAbandoned` if too many clients are lost meanwhile. The sum is charged before it
        is opened.
      replies: the number of clients' vectors in it.
    """

    open: Callable[[], Tensor]
    replies: int


@dataclass(frozen=True, eq=False, repr=False)
class UpdateRows(Private):
    """Updates of several clients, made by this process: (n, num_params), and their bits (n,)."""

    updates: Tensor
    below: Tensor


UsableReply = Union["TrainReply", PartialReply, UpdateRows, UnopenedSum]
Replies = Iterable[UsableReply]


@dataclass(eq=False, repr=False)
class CohortSum(Private):
    """Clips updates and adds them up, beside their bits.

    Guarantee: adding or removing one client moves the sum by at most the clip norm in L2 and
    `below` by one half, as `ClippedSum` states it, however the cohort is cut into parts: on the
    grid sums are exact, and in float64 their order changes only the last bits.

    Attributes:
      clipped: the sum of the updates.
      answers: the sum of the answers of a cohort that also rates the model.
      below: the centred bits' sum, in halves.
      replies: the number of clients.
    """

    clipped: ClippedSum
    answers: AnswerSum | None = None
    below: int = 0
    replies: int = 0

    def take(self, reply: UsableReply) -> None:
        """Adds a client, several, or a part.

        Raises:
          ValueError: a part was clipped differently or is of another model, or the reply is an
            unopened sum.
        """
        if isinstance(reply, UnopenedSum):
            raise ValueError(NOT_OPENED)
        if isinstance(reply, PartialReply):
            self._add_part(reply)
        else:
            if isinstance(reply, UpdateRows):
                rows = reply
            else:
                rows = UpdateRows(reply.update.unsqueeze(0), torch.tensor([reply.below]))
            # Clipped again: no client's clipping is trusted.
            self.clipped.add(rows.updates)
            self.replies += len(rows.updates)
            self.below += 2 * int(rows.below.sum()) - len(rows.below)
        if self.answers is not None:
            self.answers.take(reply)

    def _add_part(self, part: PartialReply) -> None:
        values = self.clipped.values
        ours = (self.clipped.clip_norm, self.clipped.grid, values.shape)
        theirs = (part.clip_norm, part.grid, part.values.shape)
        if ours != theirs or values.dtype != part.values.dtype:
            raise ValueError(
                f"a part must have the clip norm, the grid and the shape {ours}, not {theirs}"
            )
        values.add_(part.values)
        self.replies += part.replies
        self.below += part.below

    def part(self) -> PartialReply:
        """The values added so far, for inclusion in another sum. Not a copy."""
        summed = self.clipped
        answers: tuple[float, ...] = ()
        if self.answers is not None:
            answers = self.answers.part()
        return PartialReply(
            summed.values, self.below, self.replies, summed.clip_norm, summed.grid, answers
        )


@dataclass(frozen=True)
class AnswerRelease:
    """The release of the sum of a cohort's answers, noised at the server or by each client. It has
    the methods of a mechanism, for a cohort that is asked for nothing else.

    Guarantee: that of `AnswerSum`, noised as one Gaussian mechanism of its noise multiplier,
    sampled as `event` says. Noise and denominator are functions of public constants alone, and do
    not depend on who replied.

    Attributes:
      length: the length of an answer before it is noised.
      expected_cohort: q * population_size, a public constant.
      noise_multiplier: the noise on the sum over `SENSITIVITY`, or each client's; 0 protects
        nobody.
      noise: the server's method to draw it, one of `settings.privacy.Noise`.
      largest_cohort: the most answers for which sums on the grid are exact
        (`discreet.privacy.grid`).
      probability: q, with which a client is asked.
      own: the noise that each client draws on its own answer; None if the server noises the sum.
      event: the cost to the server's ledger of a cohort that is asked for nothing else; None if
        clients alone pay.
    """

    length: int
    expected_cohort: float
    noise_multiplier: float
    noise: str = "float"
    largest_cohort: int = 2**20
    probability: float = 1.0
    own: OwnNoise | None = None
    event: DpEvent | None = None

    def add_up(self, replies: Replies, state: RoundState) -> AnswerSum:
        """The sum of the answers, which are taken as they arrive."""
        total = AnswerSum(self)
        for reply in replies:
            total.take(in_the_clear(reply))
        return total

    def release(self, summed: AnswerSum, state: RoundState, source: RandomSource) -> Sums:
        """The noised sum."""
        return summed.released(source)

    @property
    def on_grid(self) -> bool:
        """True if the server adds integers on the grid."""
        return self.noise == "grid" and self.own is None

    @property
    def sent(self) -> int:
        """The count of numbers that a client sends: the answer, and the variance of its own noise
        if it draws any."""
        return self.length + (self.own is not None)

    @property
    def stddev(self) -> float:
        """The standard deviation of the noise on each number of the sum. With clients' own noise it
        is the value for answers about one example each; for m examples it is divided by m."""
        if self.own is None:
            unit = SENSITIVITY
        else:
            unit = self.own.unit * math.sqrt(self.expected_cohort)
        return self.noise_multiplier * unit

    def opened(self, values: Tensor) -> Sums:
        """The released sum, from a sum (sent,) that has its noise. If no client has answered with
        noise of its own, every value is unknown."""
        numbers = values.tolist()
        stddev = self.stddev
        if self.own is not None:
            *numbers, variance = numbers
            if variance:
                stddev = math.sqrt(variance)
            else:
                stddev = math.inf
        from discreet.queries.query import Sums

        return Sums(tuple(numbers), self.expected_cohort, stddev, self.probability)


class AnswerSum:
    """Adds up answers.

    Guarantee of those that the server noises: adding or removing one client moves the sum by at
    most `SENSITIVITY` in L2, whatever it answers, as `ClippedSum` states it. An answer that is
    missing adds zero. Answers that
    clients have noised are added up as they are: that is post-processing of what they released.
    """

    def __init__(self, how: AnswerRelease) -> None:
        self.how = how
        self.opened = how.opened
        grid = None
        if how.on_grid:
            grid = grid_for(
                SENSITIVITY, how.sent, largest_cohort=how.largest_cohort, noise_scale=how.stddev
            )
        self.rows = ClippedSum(how.sent, SENSITIVITY, grid=grid)

    def add(self, answers: Tensor) -> None:
        """Adds clients: answers (n, how.sent). With clients' own noise, an answer that is not
        finite or has no variance adds zero."""
        if self.how.own is None:
            self.rows.add(answers)
            return
        rows = answers.detach().cpu().double()
        self.rows.values.add_(rows[rows.isfinite().all(dim=1) & (rows[:, -1] >= 0)].sum(dim=0))

    def take(self, reply: TrainReply | UpdateRows | PartialReply) -> None:
        """Adds a client's answer, if it has sent one, or a partial sum."""
        if isinstance(reply, PartialReply):
            if reply.answers:
                self.rows.values.add_(torch.tensor(reply.answers, dtype=self.rows.values.dtype))
        elif not isinstance(reply, UpdateRows) and reply.answer is not None:
            self.add(reply.answer.unsqueeze(0))

    def part(self) -> tuple[float, ...]:
        """The values added so far, for inclusion in another sum."""
        return tuple(self.rows.values.tolist())

    def released(self, source: RandomSource) -> Sums:
        """The noised sum. The noise is drawn from `source` unless clients have drawn it."""
        if self.how.own is not None:
            return self.opened(self.rows.values)
        return self.opened(
            self.rows.noised(
                Gaussian(self.how.noise_multiplier, self.how.noise),
                source,
            )
        )


class AnswerMechanism(Protocol):
    """The release of a cohort's answers, with the methods of a mechanism
    (`discreet.mechanisms.mechanism`)."""

    @property
    def event(self) -> DpEvent | None: ...

    def add_up(self, replies: Replies, state: RoundState) -> Any: ...

    def release(self, summed: Any, state: RoundState, source: RandomSource) -> Sums: ...


def in_the_clear(reply: UsableReply) -> TrainReply | UpdateRows | PartialReply:
    """A reply that can be added up. ValueError: it is an unopened sum, which must be opened
    instead."""
    if isinstance(reply, UnopenedSum):
        raise ValueError(NOT_OPENED)
    return reply


def rating_release(
    run: ClientSettings, sizes: Sizes, *, own: OwnNoise | None = None, event: DpEvent | None = None
) -> AnswerRelease:
    """The release of a cohort's ratings of a model: noised at the server, or by `own` at each
    client."""
    user = run.user
    return AnswerRelease(
        sizes.answers,
        run.expected_cohort,
        run.evaluation.noise_multiplier,
        run.noise,
        user.population_size,
        user.probability,
        own,
        event,
    )


def add_up_unnoised(replies: Replies, state: RoundState, answers: AnswerSum | None) -> CohortSum:
    """The sum of replies to which the server adds no noise, because clients did or nothing is
    noised."""
    total = CohortSum(ClippedSum(state.params.numel(), state.clip_norm), answers)
    for reply in replies:
        total.take(reply)
    return total


def release_unnoised(summed: CohortSum, state: RoundState, source: RandomSource) -> Released:
    """The sum unchanged. `source` draws noise only for answers that clients have not noised."""
    said = None
    if summed.answers is not None:
        said = summed.answers.released(source)
    return Released(summed.clipped.total, state.clip_norm, None, summed.replies, said)
