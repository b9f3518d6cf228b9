"""Clipping: rows (updates, per-example gradients, canaries) scaled to a norm by `clip_factors`, and their sums."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from discreet.privacy.grid import LARGEST_CLIP, Grid
from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.quantile import LARGEST_NUMBER, LEAST_NUMBER
from discreet.privacy.randomness import CHUNK, RandomSource

Rows = NDArray[np.floating[Any]]
Doubles = NDArray[np.float64]

# Rows end this much below the clip norm, so that no rounding lifts one above it. Norms of per-example gradients in
# float32 have the largest error, up to about 1e-6; rounding a scaled row to float32 moves its norm by 6e-8 at most.
CLIP_MARGIN = 2e-6
LARGEST_TILE = 2 * CHUNK  # a row up to here is one tile: looking at it twice costs more than the cache that it takes


def clip_factors(norms: Tensor, clip_norm: float) -> Tensor:
    """Factors min(1, limit / norm) for norms (n,), float32 or float64, with limit = clip_norm * (1 - CLIP_MARGIN).

    Guarantee: a row times its factor has a norm of at most `clip_norm`, even if the norm was off by 1e-6 of itself and
    the product is rounded to float32. Rows up to the limit keep a factor of exactly 1; an infinite norm gives 0, and
    so does a clip norm of 0; an infinite one clips nothing. Source: Abadi et al. 2016, Algorithm 1.
    """
    limit = min(clip_norm * (1 - CLIP_MARGIN), torch.finfo(norms.dtype).max)
    return (norms / limit).clamp_min_(1).reciprocal_() if limit else torch.zeros_like(norms)


def row_norms(rows: Tensor, *, order: float = 2) -> Tensor:
    """Norms of rows (n, d) as float64 (n,). A row with NaN or infinity has the norm infinity."""
    norms = torch.linalg.vector_norm(rows.to(torch.float64), ord=order, dim=1)
    return torch.where(torch.isfinite(norms), norms, torch.inf)


def clip_by_norm(rows: Tensor, clip_norm: float, *, order: float = 2) -> tuple[Tensor, Tensor]:
    """Rows (n, d), floating point, scaled to a norm of at most `clip_norm`, and their norms before, float64 (n,).

    Guarantee: adding or removing one row moves the sum of the result by at most `clip_norm`, replacing one by twice
    that. A row that is not finite becomes zero; its norm is infinity. `order` is 2 for Gaussian noise, 1 for Laplace.
    The clip norm is as `check_clip` allows, 0 (all zeros), or infinity (clips nothing, drops what is not finite).

    >>> clipped, norms = clip_by_norm(torch.tensor([[3.0, 4.0], [0.0, 0.1]]), 1.0)
    >>> norms.tolist()[0], round(clipped.norm(dim=1)[0].item(), 4)
    (5.0, 1.0)
    """
    check_clip(clip_norm, also=(0, math.inf))
    if rows.dim() != 2 or not rows.is_floating_point():
        raise ValueError(f"rows must be floating point of shape (n, d), got {rows.dtype} of {tuple(rows.shape)}")
    # Half precision overflows in its own norm and rounds coarsely: float32 is the least that leaves here.
    rows = rows if rows.dtype == torch.float64 else rows.to(torch.float32)
    norms = row_norms(rows, order=order)
    factors = clip_factors(norms, clip_norm)
    if bool((factors == 1).all()):
        return rows.clone(), norms
    clipped = rows.to(torch.float64, copy=True).mul_(factors.unsqueeze(1))
    clipped[norms.isinf()] = 0.0  # 0 * inf is NaN, so a row that is not finite is replaced
    return clipped.to(rows.dtype), norms


class ClippedSum:
    """A float64 sum of updates (size,), each clipped to `clip_norm`, in the memory of one vector.

    Guarantee: adding or removing one update moves the sum by at most `clip_norm` in L2, up to float64 rounding (about
    1e-16 of the sum).
    """

    def __init__(self, size: int, clip_norm: float) -> None:
        check_clip(clip_norm, also=(0, math.inf))
        self.clip_norm = clip_norm
        self.total = torch.zeros(size, dtype=torch.float64)
        self._tiles = Tiles(size)

    def add(self, rows: Tensor) -> None:
        """Clips rows (n, size) and adds them; rows that are not finite add zero."""
        tiles, total = self._tiles, self.total.numpy()
        for group in tiles.groups(rows):
            kept, norms = tiles.finite(group)
            factors = clip_factors(torch.from_numpy(norms), self.clip_norm).numpy()
            for where in tiles.columns():
                total[where] += _added_up(tiles.doubles(kept[:, where], factors))

    def noised(self, mechanism: Gaussian, source: RandomSource) -> Tensor:
        """The sum with noise for `clip_norm`, (size,), float64."""
        return mechanism.add_noise(self.total, self.clip_norm, source)


class GridSum:
    """An int64 sum of updates (size,) on a grid, each clipped to `clip_norm` in exact arithmetic.

    Guarantee: adding or removing one update moves the sum by at most `clip_norm` in the L-`order` norm, exactly and in
    any order: an update counts only if its sum of |steps|^order is at most floor((clip_norm / step)^order). An update
    within that is only truncated; another one is scaled by `clip_factors` first.
    """

    def __init__(self, size: int, clip_norm: float, *, grid: Grid, order: int = 2) -> None:
        if order not in (1, 2):
            raise ValueError(f"order must be 1 or 2, not {order}")
        if not 0 < clip_norm <= LARGEST_CLIP * grid.step:
            raise ValueError(f"clip_norm must be in (0, {LARGEST_CLIP * grid.step}] on this grid, not {clip_norm}")
        self.clip_norm, self.grid, self.order = clip_norm, grid, order
        self.steps = torch.zeros(size, dtype=torch.int64)
        self._largest = float(math.floor(Fraction(clip_norm / grid.step) ** order))
        self._tiles = Tiles(size)

    @property
    def total(self) -> Tensor:
        """The sum without noise, (size,), float64."""
        return self.grid.to_float(self.steps, torch.float64)

    def add(self, rows: Tensor) -> None:
        """Clips rows (n, size), puts them on the grid and adds them; rows that are not finite add zero."""
        tiles, total = self._tiles, self.steps.numpy()
        for rows_at_once in tiles.groups(rows):
            group, factors = self._clipped(rows_at_once)
            for where in tiles.columns():
                # Below 2^53 in each coordinate, so that sums of a group are exact in float64.
                total[where] += tiles.integers(_added_up(self._whole(group[:, where], factors)))

    def noised(self, mechanism: Gaussian, source: RandomSource) -> Tensor:
        """The sum with rounded noise for `clip_norm`, (size,), float64: every value lies on the grid."""
        noised = mechanism.add_grid_noise(self.steps, self.clip_norm, grid=self.grid, source=source)
        return self.grid.to_float(noised, torch.float64)

    def _clipped(self, group: Rows) -> tuple[Rows, Doubles]:
        """The rows that are finite, and what to scale them by so that each is within the clip norm on the grid."""
        factors = np.ones(len(group))
        if self._within(group, factors).all():
            return group, factors
        kept, norms = self._tiles.finite(group, order=self.order)
        within = self._within(kept, np.ones(len(kept)))
        factors = np.where(within, 1.0, clip_factors(torch.from_numpy(norms), self.clip_norm).numpy())
        if not self._within(kept, factors).all():
            raise ArithmeticError("an update that was scaled to the clip norm is above it")
        return kept, factors

    def _within(self, rows: Rows, factors: Doubles) -> NDArray[np.bool_]:
        """True for rows within the clip norm once they are on the grid. Sums up to `_largest` < 2^53 are exact."""
        with np.errstate(over="ignore", invalid="ignore"):
            whole = (self._whole(rows[:, where], factors) for where in self._tiles.columns())
            within: NDArray[np.bool_] = _power_sums(whole, self.order) <= self._largest
        return within

    def _whole(self, part: Rows, factors: Doubles) -> Doubles:
        """In whole steps, truncated towards zero: the step is a power of two, so that dividing by it is exact."""
        steps = self._tiles.doubles(part, factors / self.grid.step)
        return np.trunc(steps, out=steps)


def clip_to_grid(update: Tensor, clip_norm: float, *, grid: Grid, order: int = 2) -> Tensor:
    """One update (size,), clipped and truncated to whole steps of `grid`: what it adds to a `GridSum`, int64."""
    total = GridSum(len(update), clip_norm, grid=grid, order=order)
    total.add(update.unsqueeze(0))
    return total.steps


class Tiles:
    """Rows of a size in tiles that stay in a core's cache, in memory that is made once."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._width = max(1, size) if size <= LARGEST_TILE else CHUNK
        self.rows = max(1, CHUNK // self._width)
        self._doubles = np.empty(self.rows * self._width)
        self._integers = np.empty(self._width, dtype=np.int64)

    def groups(self, rows: Tensor) -> Iterator[Rows]:
        """Rows (n, size) in groups of as many as fit a tile, at least one."""
        if rows.dim() != 2 or rows.shape[1] != self.size or not rows.is_floating_point():
            wanted = f"rows must be floating point of shape (n, {self.size})"
            raise ValueError(f"{wanted}, got {rows.dtype} of {tuple(rows.shape)}")
        rows = rows.detach().cpu()
        values: Rows = (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy()
        return (values[start : start + self.rows] for start in range(0, len(values), self.rows))

    def columns(self) -> Iterator[slice]:
        """The tiles of a group, by their columns."""
        return (slice(start, start + self._width) for start in range(0, self.size, self._width))

    def doubles(self, part: Rows, factors: Doubles | None = None) -> Doubles:
        """A tile in float64, each row times its factor. It is overwritten by the next one."""
        tile = self._doubles[: part.size].reshape(part.shape)
        np.copyto(tile, part)
        if factors is not None and (factors != 1).any():
            tile *= factors[:, None]
        return tile

    def integers(self, whole: Doubles) -> NDArray[np.int64]:
        """Whole numbers (m,) as int64. They are overwritten by the next ones."""
        found = self._integers[: len(whole)]
        np.copyto(found, whole, casting="unsafe")
        return found

    def finite(self, group: Rows, *, order: int = 2) -> tuple[Rows, Doubles]:
        """The rows whose norm is a number, and their norms."""
        with np.errstate(over="ignore", invalid="ignore"):
            norms = _power_sums((self.doubles(group[:, where]) for where in self.columns()), order) ** (1 / order)
        found = np.isfinite(norms)
        return (group, norms) if found.all() else (group[found], norms[found])


def _power_sums(tiles: Iterable[Doubles], order: int) -> Doubles:
    """The sum of |values|^order of each row, (k,), over tiles (k, m)."""
    # Not by BLAS: its threads wait for each other longer than a tile takes.
    each = (np.einsum("ij,ij->i", tile, tile) if order == 2 else np.abs(tile).sum(1) for tile in tiles)
    sums: Doubles = sum(each, np.zeros(()))
    return sums


def _added_up(rows: Doubles) -> Doubles:
    """The sum of rows (k, m), (m,): a single row is not copied."""
    total: Doubles = rows[0] if len(rows) == 1 else rows.sum(0)
    return total


def check_clip(clip_norm: float, name: str = "clip_norm", *, also: tuple[float, ...] = ()) -> None:
    """Raises ValueError for a clip norm so small or so large that float32 loses it, but for those of `also`."""
    if clip_norm not in also and not LEAST_NUMBER <= clip_norm <= LARGEST_NUMBER:
        raise ValueError(f"{name} must be within [{LEAST_NUMBER:g}, {LARGEST_NUMBER:g}], not {clip_norm}")
