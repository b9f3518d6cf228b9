"""The sums of what clients send: as a process adds them up, and as the server is given them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from discreet.privacy.clipping import ClippedSum, GridSum, clip_by_norm
from discreet.privacy.grid import Grid
from discreet.privacy.randomness import RandomSource

if TYPE_CHECKING:
    from dp_accounting import DpEvent


class Reply(Protocol):
    """A client's reply: its update (num_params,), its bit, and its answer to a query, if there was one."""

    @property
    def update(self) -> Tensor: ...

    @property
    def below(self) -> bool: ...

    @property
    def answer(self) -> Tensor | None: ...


@dataclass(frozen=True, eq=False)
class PartialReply:
    """The part of some clients in a round's sums, made by this process or by one forked from it.

    It never comes in a message: it is added as it is, while an update that a client sends is clipped once more.

    Attributes:
      values: (num_params,), the clipped updates' sum: float64, or int64 in steps of the grid. Under secure aggregation
        the sum of the clients' noised vectors, int64 (length,), as `SecureSum` has them.
      below: the centred bits' sum, in halves.
      replies: how many clients.
      clip_norm, grid: what clipped the updates, and on which grid (None: in floating point).
      answers: the answers' sum, as `AnswerSum.part` has it; empty if no query was asked.
      epsilon_example, epsilon_local, epsilon_local_pure: the largest over these clients, by their own accounts.
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


@dataclass(frozen=True, eq=False)
class UnopenedSum:
    """A sum of clients' noised vectors that nobody has read.

    Attributes:
      open: reads it: the noised total, int64 (length,), centred as `SecureSum.centred` has it. It raises
        `RoundAbandoned` if too many clients are lost meanwhile. It is charged before it is opened.
      replies: how many clients' vectors are in it.
    """

    open: Callable[[], Tensor]
    replies: int


Replies = Iterable[Reply | PartialReply | UnopenedSum]


class Answers(Protocol):
    """The sum of a cohort's answers to a query: see `discreet.evaluation.answer_sum`."""

    def take(self, reply: Any) -> None:
        """Adds a client's answer, or the answers of a part."""

    def released(self, source: RandomSource) -> Any:
        """The sum with noise."""

    def opened(self, values: Tensor) -> Any:
        """The sum as it was opened, (length,), with noise."""


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

    def take(self, reply: Reply | PartialReply) -> None:
        """Adds a client, or a part.

        Raises:
          ValueError: a part was clipped otherwise, or is of another model.
        """
        if not isinstance(reply, PartialReply):
            self.add(reply.update.unsqueeze(0), torch.tensor([reply.below]))
            return
        values = self._values
        ours, theirs = (self.clip_norm, self.grid, values.shape), (reply.clip_norm, reply.grid, reply.values.shape)
        if ours != theirs or values.dtype != reply.values.dtype:
            raise ValueError(f"a part must have the clip norm, the grid and the shape {ours}, not {theirs}")
        values.add_(reply.values)
        self.replies += reply.replies
        self.below += reply.below

    def part(self) -> PartialReply:
        """The values added so far, for another sum to take in. Not a copy."""
        return PartialReply(self._values, self.below, self.replies, self.clip_norm, self.grid)

    @property
    def _values(self) -> Tensor:
        return self.clipped.total if isinstance(self.clipped, ClippedSum) else self.clipped.steps


def clipped(updates: Tensor, clip_norm: float) -> tuple[Tensor, Tensor]:
    """Updates (n, num_params) clipped to an L2 norm, and whether each was within it: what a client does of its own."""
    rows, norms = clip_by_norm(updates, clip_norm)
    return rows, norms <= clip_norm


def take_all(replies: Replies, total: CohortSum | None, answers: Answers | None) -> None:
    """Adds replies up as they come.

    Raises:
      ValueError: one of them is a sum that nobody has read, which is opened and not added up.
    """
    for reply in replies:
        if isinstance(reply, UnopenedSum):
            raise ValueError("a sum that nobody has read was given to a mechanism that reads replies")
        if total is not None:
            total.take(reply)
        if answers is not None:
            answers.take(reply)


@dataclass(frozen=True)
class Round:
    """The facts of a round that its release needs.

    Attributes:
      number: of the rounds before it.
      clip_norm: C_t.
      expected_cohort: the public denominator of the average.
      source: of the noise.
      charge: is called with the event before noise is added to anything, or a sum is opened: it writes the ledger.
      answers: the empty sum of the answers to a query; None in a round without one.
    """

    number: int
    num_params: int
    clip_norm: float
    expected_cohort: float
    source: RandomSource
    charge: Callable[[DpEvent], None]
    answers: Answers | None = None


@dataclass(frozen=True, eq=False)
class Released:
    """The release of a round, of which all that follows is post-processing.

    Attributes:
      total: the noised sum of the updates, (num_params,).
      clip_norm: of the next round.
      fraction_below: the noised fraction of update norms at or below the clip norm; None without an adaptive one.
      replies: how many updates were added up. Who takes part is not covered by the guarantee.
      answers: the noised sum of the answers; None in a round without a query.
    """

    total: Tensor
    clip_norm: float
    fraction_below: float | None
    replies: int
    answers: Any = None


class ServerRelease(Protocol):
    """The server's part of a mechanism, with the constants of a run's rounds.

    Attributes:
      guarantee, event: whom a round is charged to, and its event; None if nothing is charged.
      masked: True if it opens one sum, and reads no reply.
      exact: True if its sums are of whole numbers, whose order does not matter.
      clipping: the rule by which the clip norm moves, with `target_quantile` and `clip_max`; None without one.
      sum_noise: the noise that is expected in the sum, over `norm`.
    """

    @property
    def guarantee(self) -> str | None: ...

    @property
    def event(self) -> DpEvent | None: ...

    @property
    def masked(self) -> bool: ...

    @property
    def exact(self) -> bool: ...

    @property
    def clipping(self) -> Any: ...

    @property
    def sum_noise(self) -> float: ...

    def norm(self, clip_norm: float) -> float:
        """The bound on a client's part in a sum, in a round with this clip norm."""

    def empty(self, num_params: int, clip_norm: float) -> CohortSum:
        """The sum that a round's replies are added to."""

    def release(self, replies: Replies, at: Round) -> Released:
        """Adds replies up as they come, charges the event, and only then noises the sum or opens it."""

    def rate(self, replies: Replies, at: Round, event: DpEvent | None) -> Any:
        """As `release`, of the answers of clients that are asked for nothing else; `event`: what they cost."""


@dataclass(frozen=True)
class PlainSum:
    """The release of a round in which no mechanism of the server noises: clients alone have, or nobody. Nothing is
    clipped, noised or charged."""

    guarantee: ClassVar[None] = None
    event: ClassVar[None] = None
    masked: ClassVar[bool] = False
    exact: ClassVar[bool] = False
    clipping: ClassVar[None] = None
    sum_noise: ClassVar[float] = 0.0

    def norm(self, clip_norm: float) -> float:
        return clip_norm

    def empty(self, num_params: int, clip_norm: float) -> CohortSum:
        return CohortSum(num_params, clip_norm, None)

    def release(self, replies: Replies, at: Round) -> Released:
        total = self.empty(at.num_params, at.clip_norm)
        take_all(replies, total, at.answers)
        answers = at.answers and at.answers.released(at.source)
        return Released(total.clipped.total, at.clip_norm, None, total.replies, answers)

    def rate(self, replies: Replies, at: Round, event: DpEvent | None) -> Any:
        assert at.answers is not None
        take_all(replies, None, at.answers)
        return at.answers.released(at.source)
