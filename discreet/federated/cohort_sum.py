"""A cohort's clipped updates and bits, added up as they come, whether one by one or in parts made side by side."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from discreet.privacy.clipped_sum import ClippedSum, GridSum
from discreet.privacy.grid import Grid


@dataclass(frozen=True, eq=False)
class PartialSum:
    """The sum over some clients of a cohort, made by a `CohortSum` of this process or of one forked from it.

    No message of Flower's makes one: it is taken as it is, where a client's own update is clipped once more.

    Attributes:
      values: (num_params,), the clipped updates' sum: float64, or int64 in steps of the grid.
      below: the centred bits' sum, in halves.
      replies: how many updates.
      clip_norm, grid: what clipped them, and on which grid (None: in floating point).
    """

    values: Tensor
    below: int
    replies: int
    clip_norm: float
    grid: Grid | None


class CohortSum:
    """Clips updates to `clip_norm` and adds them up, beside their bits.

    Guarantee: adding or removing one client moves the sum by at most `clip_norm` in L2 and `below` by one half, as
    `ClippedSum` and `GridSum` state it, however the cohort is cut into parts: on the grid sums are exact, and in
    float64 their order matters to the last bits alone.
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

    def merge(self, part: PartialSum) -> None:
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

    def part(self) -> PartialSum:
        """What has been added up, to be merged into another sum. Not a copy."""
        return PartialSum(self._values, self.below, self.replies, self.clip_norm, self.grid)

    @property
    def _values(self) -> Tensor:
        return self.clipped.total if isinstance(self.clipped, ClippedSum) else self.clipped.steps
