"""The public facts about a linear model of a table that decide how far noise moves its outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from discreet.data.targets import CLASSES, NUMBERS, SURVIVAL


@dataclass(frozen=True)
class LinearModel:
    """A linear model of a table with public ranges.

    Attributes:
      row_norm: the expected norm of an encoded row, with a 1 for the intercept, from public facts.
      kind: the kind of target.
      outputs: the number of outputs.
      products: of least squares in one round, the weight of X'y beside X'X; else None.
    """

    row_norm: float
    kind: str
    outputs: int
    products: float | None = None

    @property
    def gradient_norm(self) -> float:
        """The expected norm of an example's gradient at the start, by which it is clipped."""
        if self.products is not None:
            return self.row_norm * math.hypot(self.row_norm, self.products)
        return self.residual * self.row_norm

    @property
    def residual(self) -> float:
        """The expected norm of the loss's gradient by the outputs, for an example that the model
        has wrong."""
        if self.kind in (CLASSES, SURVIVAL):
            return 1.0
        return 0.5 / math.sqrt(self.outputs)

    @property
    def curvature(self) -> float:
        """The largest curvature of the loss, over the squared norm of a row."""
        if self.kind == NUMBERS:
            return 2.0 / self.outputs
        return 0.5

    @property
    def scale(self) -> float:
        """The size of an output to which a bound on noise refers: 1 for a logit, and a quarter of
        that for a number, which lies in -1..1."""
        return 0.25 if self.kind == NUMBERS else 1.0

    def said(self, noise: float) -> str:
        """An output and how far noise moves it, in words. A number lies in -1..1 of its range."""
        if self.kind == NUMBERS:
            return f"a prediction by {50 * noise:.2g} % of its range"
        return f"a logit by {noise:.2g}"

    def moved(self, stddev: float) -> float:
        """The standard deviation of an output, or of the difference of two classes' outputs, if
        each parameter has this one."""
        noise = stddev * self.row_norm
        return math.sqrt(2) * noise if self.kind == CLASSES else noise
