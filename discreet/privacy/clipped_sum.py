"""Sums of clipped updates that grow as updates come: in float64, or exactly on an integer grid."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from discreet.privacy.clipping import clip_by_norm, row_norms
from discreet.privacy.grid import Grid
from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.noise import RandomSource


class ClippedSum:
    """A float64 sum of updates (size,), each clipped to `clip_norm`.

    Guarantee: adding or removing one update moves the sum by at most `clip_norm` in L2, up to float64 rounding (about
    1e-16 of the sum). The memory is one vector, however many updates come.
    """

    def __init__(self, size: int, clip_norm: float) -> None:
        self.clip_norm = clip_norm
        self.total = torch.zeros(size, dtype=torch.float64)

    def add(self, rows: Tensor) -> None:
        """Clips rows (n, size) and adds them; rows that are not finite add zero."""
        clipped, _ = clip_by_norm(rows, self.clip_norm)
        self.total += clipped[0] if len(clipped) == 1 else clipped.sum(0, dtype=torch.float64)

    def noised(self, mechanism: Gaussian, source: RandomSource) -> Tensor:
        """The sum with noise for `clip_norm`, (size,), float64."""
        return mechanism.add_noise(self.total, self.clip_norm, source)


class GridSum:
    """An int64 sum of updates (size,) on a grid, each clipped to `clip_norm` in exact arithmetic.

    Guarantee: adding or removing one update moves the sum by at most `clip_norm` in L2, exactly and in any order.
    """

    def __init__(self, size: int, clip_norm: float, *, grid: Grid) -> None:
        self.clip_norm, self.grid = clip_norm, grid
        self.steps = torch.zeros(size, dtype=torch.int64)

    @property
    def total(self) -> Tensor:
        """The sum without noise, (size,), float64."""
        return self.grid.to_float(self.steps, torch.float64)

    def add(self, rows: Tensor) -> None:
        """Clips rows (n, size), puts them on the grid and adds them; rows that are not finite add zero."""
        for row, norm in zip(rows, row_norms(rows).tolist(), strict=True):
            if math.isfinite(norm):
                # Scaled down first: quantise takes no value beyond its range, and clips exactly what is left.
                scale = min(1.0, self.clip_norm / norm) if norm else 1.0
                self.steps += self.grid.quantise(row.double() * scale, self.clip_norm)

    def noised(self, mechanism: Gaussian, source: RandomSource) -> Tensor:
        """The sum with rounded noise for `clip_norm`, (size,), float64: every value lies on the grid."""
        noised = mechanism.add_grid_noise(self.steps, self.clip_norm, grid=self.grid, source=source)
        return self.grid.to_float(noised, torch.float64)
