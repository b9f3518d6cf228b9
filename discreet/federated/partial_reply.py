"""The reply of several clients at once, from a simulation that trains them together and adds them up."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from discreet.privacy.grid import Grid


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
