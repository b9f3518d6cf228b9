"""Sums of clipped updates that grow as updates come: in float64, or exactly on an integer grid.

An update is worked on in tiles that stay in a core's cache: a sum costs little more than reading the update twice, and
nothing of the update's size is made on the way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from discreet.privacy.clipping import ROUNDING_MARGIN
from discreet.privacy.grid import LARGEST_CLIP, Grid
from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.randomness import CHUNK, RandomSource

Rows = NDArray[np.floating[Any]]
Doubles = NDArray[np.float64]
Truths = NDArray[np.bool_]

LARGEST_TILE = 2 * CHUNK  # a row up to here is one tile: looking at it twice costs more than the cache that it takes
SUMMED_AT_ONCE = 2**13  # BLAS takes several threads for more, which wait for each other
GRID_MARGIN = 1 - 2.0**-36  # norms are right to 1e-12: what is scaled to this share of the clip is within it


class ClippedSum:
    """A float64 sum of updates (size,), each clipped to `clip_norm`.

    Guarantee: adding or removing one update moves the sum by at most `clip_norm` in L2, up to float64 rounding (about
    1e-16 of the sum). The memory is one vector, however many updates come.
    """

    def __init__(self, size: int, clip_norm: float) -> None:
        if math.isnan(clip_norm) or clip_norm < 0:
            raise ValueError(f"clip_norm must be a number of at least 0 (got {clip_norm})")
        self.clip_norm = clip_norm
        self.total = torch.zeros(size, dtype=torch.float64)
        self._tiles = _Tiles(size)

    def add(self, rows: Tensor) -> None:
        """Clips rows (n, size) and adds them; rows that are not finite add zero."""
        tiles, total = self._tiles, self.total.numpy()
        for group in tiles.groups(rows):
            if not tiles.single and surely_within(group[0], self.clip_norm):  # a row of many tiles comes alone
                total += group[0]
                continue
            kept, norms = tiles.finite(group)
            scales = _scales(self.clip_norm * ROUNDING_MARGIN, norms, norms > self.clip_norm)
            in_tile = tiles.single and kept is group  # from the look at their norms
            for where in tiles.columns():
                if len(kept) == 1 and scales[0] == 1:
                    total[where] += tiles.current(kept)[0] if in_tile else kept[0, where]
                    continue
                part = tiles.current(kept) if in_tile else tiles.doubles(kept[:, where])
                if len(part) == 1:
                    total[where] += np.multiply(part[0], scales[0], out=part[0])
                else:
                    total[where] += np.einsum("i,ij->j", scales, part)

    def noised(self, mechanism: Gaussian, source: RandomSource) -> Tensor:
        """The sum with noise for `clip_norm`, (size,), float64."""
        return mechanism.add_noise(self.total, self.clip_norm, source)


class GridSum:
    """An int64 sum of updates (size,) on a grid, each clipped to `clip_norm` in exact arithmetic.

    Guarantee: adding or removing one update moves the sum by at most `clip_norm` in L2, exactly and in any order: an
    update counts only if its sum of squares, in whole steps, is at most floor((clip_norm / step)^2).
    """

    def __init__(self, size: int, clip_norm: float, *, grid: Grid) -> None:
        if not 0 < clip_norm <= LARGEST_CLIP * grid.step:
            raise ValueError(f"clip_norm must be in (0, {LARGEST_CLIP * grid.step}] on this grid, not {clip_norm}")
        self.clip_norm, self.grid = clip_norm, grid
        self.steps = torch.zeros(size, dtype=torch.int64)
        self._largest = float(math.floor(Fraction(clip_norm / grid.step) ** 2))
        self._tiles = _Tiles(size)

    @property
    def total(self) -> Tensor:
        """The sum without noise, (size,), float64."""
        return self.grid.to_float(self.steps, torch.float64)

    def add(self, rows: Tensor) -> None:
        """Clips rows (n, size), puts them on the grid and adds them; rows that are not finite add zero."""
        tiles, total = self._tiles, self.steps.numpy()
        for rows_at_once in tiles.groups(rows):
            group, scales = self._clipped(rows_at_once)
            for where in tiles.columns():
                # Rows of one tile are still in it, from the look at their squares.
                whole = tiles.current(group) if tiles.single else self._whole(group[:, where], scales)
                # Below 2^53 in each coordinate, so that sums of a group are exact in float64.
                total[where] += tiles.integers(whole[0] if len(whole) == 1 else whole.sum(0))

    def noised(self, mechanism: Gaussian, source: RandomSource) -> Tensor:
        """The sum with rounded noise for `clip_norm`, (size,), float64: every value lies on the grid."""
        noised = mechanism.add_grid_noise(self.steps, self.clip_norm, grid=self.grid, source=source)
        return self.grid.to_float(noised, torch.float64)

    def _clipped(self, group: Rows) -> tuple[Rows, Doubles]:
        """The rows that are finite, and what to scale them by so that each is within the clip norm on the grid."""
        scales = np.ones(len(group))
        if self._within(group, scales).all():
            return group, scales
        kept, norms = self._tiles.finite(group)
        over = ~self._within(kept, np.ones(len(kept)))
        scales = _scales(self.clip_norm * GRID_MARGIN, norms, over)
        if not self._within(kept, scales).all():
            raise ArithmeticError("an update that was scaled to the clip norm is above it")
        return kept, scales

    def _within(self, rows: Rows, scales: Doubles) -> Truths:
        """Which rows are within the clip norm once they are on the grid. Sums up to `_largest` < 2^53 are exact."""
        with np.errstate(over="ignore", invalid="ignore"):
            squares = _squares(self._whole(rows[:, where], scales) for where in self._tiles.columns())
            within: Truths = squares <= self._largest
        return within

    def _whole(self, part: Rows, scales: Doubles) -> Doubles:
        """In whole steps, truncated towards zero: the step is a power of two, so that dividing by it is exact."""
        steps = self._tiles.doubles(part, scales / self.grid.step)
        return np.trunc(steps, out=steps)


def surely_within(row: Rows, clip_norm: float) -> bool:
    """Whether sums in float32 tell for certain that `row` (n,) is finite and its norm at most `clip_norm`.

    They read a row once, and save its way through float64. A sum of squares of m float32 values is right to m * 2^-24
    of itself in any order (Higham 2002, "Accuracy and Stability of Numerical Algorithms", eq. 3.5), here to 2^-11, and
    what underflows is nothing to a clip norm of 2^-30. False says nothing: the norm may be just below the clip norm.
    """
    if row.dtype != np.float32 or clip_norm < 2.0**-30:
        return False
    pieces = (row[start : start + SUMMED_AT_ONCE] for start in range(0, len(row), SUMMED_AT_ONCE))
    with np.errstate(over="ignore", invalid="ignore"):
        squares = sum(float(np.dot(piece, piece)) for piece in pieces)
    return math.isfinite(squares) and squares <= clip_norm**2 * (1 - 2.0**-9)


class _Tiles:
    """The memory that rows of a size are worked on in: a tile at a time, made once."""

    def __init__(self, size: int) -> None:
        self.size, self.single = size, size <= LARGEST_TILE
        self._width = max(1, size) if self.single else CHUNK
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

    def doubles(self, part: Rows, scales: Doubles | None = None) -> Doubles:
        """A tile in float64, each row by its scale. It is overwritten by the next one."""
        tile = self.current(part)
        np.copyto(tile, part)
        if scales is not None and (scales != 1).any():
            tile *= scales[:, None]
        return tile

    def current(self, group: Rows) -> Doubles:
        """What stands in the tile of a group."""
        return self._doubles[: group.size].reshape(group.shape)

    def integers(self, whole: Doubles) -> NDArray[np.int64]:
        """Whole numbers (m,) as int64. They are overwritten by the next ones."""
        found = self._integers[: len(whole)]
        np.copyto(found, whole, casting="unsafe")
        return found

    def finite(self, group: Rows) -> tuple[Rows, Doubles]:
        """The rows whose norm is a number, and their norms."""
        with np.errstate(over="ignore", invalid="ignore"):
            norms = np.sqrt(_squares(self.doubles(group[:, where]) for where in self.columns()))
        found = np.isfinite(norms)
        return (group, norms) if found.all() else (group[found], norms[found])


def _squares(tiles: Iterable[Doubles]) -> Doubles:
    """The sum of squares of each row, (k,), over tiles (k, m)."""
    # Not by BLAS: its threads wait for each other longer than a tile takes.
    sums: Doubles = sum((np.einsum("ij,ij->i", tile, tile) for tile in tiles), np.zeros(()))
    return sums


def _scales(norm_clip: float, norms: Doubles, over: Truths) -> Doubles:
    """What brings the rows that are `over` to the norm `norm_clip`; 1 for the others."""
    return np.divide(norm_clip, norms, out=np.ones(len(norms)), where=over)
