"""Clients that are trained together, and plain gradient descent for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from discreet.training.local_training import LocalSettings
from simulation.batches import Table
from simulation.draws import Draws


@dataclass(frozen=True, eq=False)
class Chunk:
    """Clients that are trained together: what they hold, what they are asked, what they draw.

    Attributes:
        table: their examples, those with most of them first.
        settings: of each; they differ in the noise of DP-SGD at most.
        draws: their random numbers, row by row.
    """

    table: Table
    settings: Sequence[LocalSettings]
    draws: Draws

    def __post_init__(self) -> None:
        if len(self.settings) != len(self.table.sizes):
            raise ValueError("settings must be one a client")


@dataclass(frozen=True, eq=False)
class Descent:
    """Parameters (k, ...) that go downhill in place, and their velocities where there is momentum."""

    params: list[Tensor]
    velocities: list[Tensor] | None
    settings: LocalSettings

    def current(self, active: int) -> list[Tensor]:
        """The parameters of the first `active` clients."""
        return [values[:active] for values in self.params]

    def into(self, active: int) -> tuple[list[Tensor], float, float]:
        """Where gradients go: tensors t, and the numbers of t = keep * t + rate * gradient."""
        if self.velocities is None:
            return self.current(active), 1.0, -self.settings.learning_rate
        return [values[:active] for values in self.velocities], self.settings.momentum, 1.0

    def settle(self, active: int) -> None:
        """Ends a step: with momentum it is now that parameters move."""
        if self.velocities is not None:
            for values, velocity in zip(self.current(active), self.velocities, strict=True):
                values.sub_(velocity[:active], alpha=self.settings.learning_rate)


def descent_of(params: list[Tensor], settings: LocalSettings) -> Descent:
    """The descent from `params`, which it moves."""
    return Descent(params, [torch.zeros_like(values) for values in params] if settings.momentum else None, settings)
