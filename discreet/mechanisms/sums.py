"""The sums of what clients send: as a process adds them up, and as the server is given them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from discreet.privacy.clipping import ClippedSum, clip_by_norm
from discreet.privacy.grid import Grid
from discreet.privacy.randomness import RandomSource


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

    @property
    def in_floats(self) -> Tensor:
        """The updates' sum, float64."""
        return self.values if self.grid is None else self.values.double() * self.grid.step


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
    `ClippedSum` states it, however the cohort is cut into parts: on the grid sums are exact, and in
    float64 their order changes only the last bits.
    """

    def __init__(self, num_params: int, clip_norm: float, grid: Grid | None) -> None:
        self.clip_norm, self.grid = clip_norm, grid
        self.clipped = ClippedSum(num_params, clip_norm, grid=grid)
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
        values = self.clipped.values
        ours, theirs = (self.clip_norm, self.grid, values.shape), (reply.clip_norm, reply.grid, reply.values.shape)
        if ours != theirs or values.dtype != reply.values.dtype:
            raise ValueError(f"a part must have the clip norm, the grid and the shape {ours}, not {theirs}")
        values.add_(reply.values)
        self.replies += reply.replies
        self.below += reply.below

    def part(self) -> PartialReply:
        """The values added so far, for another sum to take in. Not a copy."""
        return PartialReply(self.clipped.values, self.below, self.replies, self.clip_norm, self.grid)


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
