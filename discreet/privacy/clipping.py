"""Clipping: scales rows (updates, per-example gradients, canaries) to at most a norm, and adds them
up."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from discreet.privacy.grid import LARGEST_CLIP, Grid
from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.quantile import LARGEST_NUMBER, LEAST_NUMBER
from discreet.privacy.randomness import CHUNK, RandomSource

# Rows end this much below the clip norm, so that no rounding lifts one above it. Norms of
# per-example gradients in float32 have the largest error, up to about 1e-6; rounding a scaled row
# to float32 moves its norm by 6e-8 at most.
CLIP_MARGIN = 2e-6


def clip_factors(norms: Tensor, clip_norm: float) -> Tensor:
    """Factors min(1, limit / norm) for norms (n,), float32 or float64. The limit is
    clip_norm * (1 - CLIP_MARGIN).

    Guarantee: a row times its factor has a norm of at most `clip_norm`, even if the norm has a
    relative error of 1e-6 and the product is rounded to float32. Rows up to the limit keep a factor
    of exactly 1. An infinite norm or a clip norm of 0 gives 0; an infinite clip norm clips nothing.
    Source: Abadi et al. 2016, Algorithm 1.
    """
    limit = min(clip_norm * (1 - CLIP_MARGIN), torch.finfo(norms.dtype).max)
    if limit:
        return (norms / limit).clamp_min_(1).reciprocal_()
    return torch.zeros_like(norms)


def row_norms(rows: Tensor, *, order: float = 2) -> Tensor:
    """Norms of rows (n, d) as float64 (n,). A row with NaN or infinity has the norm infinity."""
    norms = torch.linalg.vector_norm(rows.to(torch.float64), ord=order, dim=1)
    return torch.where(torch.isfinite(norms), norms, torch.inf)


def clip_by_norm(rows: Tensor, clip_norm: float, *, order: float = 2) -> tuple[Tensor, Tensor]:
    """Rows (n, d), floating point, clipped to a norm of at most `clip_norm`, and their norms before
    clipping, float64 (n,).

    Guarantee: adding or removing one row moves the sum of the result by at most `clip_norm`,
    replacing one by twice that. A row that is not finite becomes zero; its norm is infinity.
    `order` is 2 for Gaussian noise, 1 for Laplace. The clip norm is one that `check_clip` allows, 0
    (all zeros), or infinity (clips nothing, drops rows that are not finite).

    >>> clipped, norms = clip_by_norm(torch.tensor([[3.0, 4.0], [0.0, 0.1]]), 1.0)
    >>> norms.tolist()[0], round(clipped.norm(dim=1)[0].item(), 4)
    (5.0, 1.0)
    """
    check_clip(clip_norm, also=(0, math.inf))
    if rows.dim() != 2 or not rows.is_floating_point():
        raise ValueError(
            f"rows must be floating point of shape (n, d), got {rows.dtype} of {tuple(rows.shape)}"
        )
    # Half precision rounds coarsely, and its norm can overflow: the result is at least float32.
    if rows.dtype != torch.float64:
        rows = rows.to(torch.float32)
    norms = row_norms(rows, order=order)
    factors = clip_factors(norms, clip_norm)
    if bool((factors == 1).all()):
        return rows.clone(), norms
    clipped = rows.to(torch.float64, copy=True).mul_(factors.unsqueeze(1))
    clipped[norms.isinf()] = 0.0  # 0 * inf would be NaN
    return clipped.to(rows.dtype), norms


def clip_updates(updates: Tensor, clip_norm: float) -> tuple[Tensor, Tensor]:
    """Updates (n, num_params) clipped to an L2 norm, and their bits (n,): True if it was within."""
    clipped, norms = clip_by_norm(updates, clip_norm)
    return clipped, norms <= clip_norm


class ClippedSum:
    """A sum of updates (size,), each clipped to `clip_norm`: float64, or on a `grid` int64 in whole
    steps.

    Guarantee: adding or removing one update moves the sum by at most `clip_norm` in L2, up to
    float64 rounding (about 1e-16 of the sum). On a grid the bound is exact, in the L-`order` norm
    and for any order of the updates: each is added only if its sum of |steps|^order is at most
    floor((clip_norm / step)^order). An update within that is only truncated; a longer one is scaled
    by `clip_factors` first.
    """

    def __init__(
        self, size: int, clip_norm: float, *, grid: Grid | None = None, order: int = 2
    ) -> None:
        if grid is None:
            check_clip(clip_norm, also=(0, math.inf))
        elif not 0 < clip_norm <= LARGEST_CLIP * grid.step:
            raise ValueError(
                f"clip_norm must be in (0, {LARGEST_CLIP * grid.step}] on this grid, not "
                f"{clip_norm}"
            )
        self.clip_norm = clip_norm
        self.grid = grid
        self.order = order
        self.values = torch.zeros(size, dtype=torch.float64 if grid is None else torch.int64)
        if grid is None:
            self._largest = math.inf
        else:
            self._largest = float(math.floor(Fraction(clip_norm / grid.step) ** order))

    @property
    def total(self) -> Tensor:
        """The sum without noise, (size,), float64."""
        if self.grid is None:
            return self.values
        return self.grid.to_float(self.values, torch.float64)

    def add(self, rows: Tensor) -> None:
        """Clips rows (n, size) and adds them; rows that are not finite add zero."""
        size = len(self.values)
        if rows.dim() != 2 or rows.shape[1] != size or not rows.is_floating_point():
            wanted = f"rows must be floating point of shape (n, {size})"
            raise ValueError(f"{wanted}, got {rows.dtype} of {tuple(rows.shape)}")
        for group in torch.split(rows.detach().cpu(), max(1, CHUNK // max(1, size))):
            kept, factors = self._clipped(group)
            # In tiles of columns, which stay in a core's cache.
            tiles = zip(
                torch.split(self.values, CHUNK), torch.split(kept, CHUNK, dim=1), strict=True
            )
            for total, part in tiles:
                # On a grid each coordinate of a group's sum is below 2^53, so it is exact in
                # float64.
                total += self._tile(part, factors).sum(0).to(total.dtype)

    def noised(self, mechanism: Gaussian, source: RandomSource) -> Tensor:
        """The sum with noise for `clip_norm`, (size,), float64; on a grid it is rounded to whole
        steps."""
        if self.grid is None:
            return mechanism.add_noise(self.values, self.clip_norm, source)
        noised = mechanism.add_grid_noise(
            self.values, self.clip_norm, grid=self.grid, source=source
        )
        return self.grid.to_float(noised, torch.float64)

    def _clipped(self, group: Tensor) -> tuple[Tensor, Tensor]:
        """The finite rows, and the factor that brings each within the clip norm."""
        within = torch.zeros(len(group), dtype=torch.bool)
        if self.grid is not None:
            # Sums up to `_largest` < 2^53 are exact.
            within = (
                self._power_sums(group, torch.ones(len(group), dtype=torch.float64))
                <= self._largest
            )
            if within.all():
                return group, within.double()
        norms = self._power_sums(group) ** (1 / self.order)
        finite = norms.isfinite()
        if not finite.all():
            group = group[finite]
            norms = norms[finite]
            within = within[finite]
        factors = torch.where(within, 1.0, clip_factors(norms, self.clip_norm))
        if self.grid is not None:
            scaled = self._power_sums(group, factors)
            if not (scaled <= self._largest).all():
                raise ArithmeticError("an update that was scaled to the clip norm is above it")
        return group, factors

    def _power_sums(self, rows: Tensor, factors: Tensor | None = None) -> Tensor:
        """The sum of |values|^order of each row, (k,), float64: of the unscaled rows, or with
        `factors` of the rows as they are added to the sum."""
        total = torch.zeros(len(rows), dtype=torch.float64)
        for part in torch.split(rows, CHUNK, dim=1):
            if factors is None:
                tile = part.double()
            else:
                tile = self._tile(part, factors)
            total += tile.abs().pow_(self.order).sum(1)
        return total

    def _tile(self, part: Tensor, factors: Tensor) -> Tensor:
        """Each row times its factor, float64; on a grid in whole steps, truncated towards zero. The
        step is a power of two, so that dividing by it is exact."""
        if self.grid is None:
            return part.double() * factors.unsqueeze(1)
        return (part.double() * (factors / self.grid.step).unsqueeze(1)).trunc_()


def clip_to_grid(update: Tensor, clip_norm: float, *, grid: Grid, order: int = 2) -> Tensor:
    """One update (size,), clipped and truncated to whole steps of `grid`, int64, as a `ClippedSum`
    adds it."""
    total = ClippedSum(len(update), clip_norm, grid=grid, order=order)
    total.add(update.unsqueeze(0))
    return total.values


def check_clip(clip_norm: float, name: str = "clip_norm", *, also: tuple[float, ...] = ()) -> None:
    """Raises ValueError for a clip norm too small or too large for float32. Those in `also` are
    allowed."""
    if clip_norm not in also and not LEAST_NUMBER <= clip_norm <= LARGEST_NUMBER:
        raise ValueError(
            f"{name} must be within [{LEAST_NUMBER:g}, {LARGEST_NUMBER:g}], not {clip_norm}"
        )
