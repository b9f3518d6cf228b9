"""Sums of clipped rows in floating point: what a server adds up, and no client, whose code ends with `clipping.py`."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from discreet.privacy.clipping import Rows, Tiles, added_up, check_clip, clip_factors
from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.randomness import RandomSource

SUMMED_AT_ONCE = 2**13  # BLAS takes several threads for more, which wait for each other


class ClippedSum:
    """A float64 sum of updates (size,), each clipped to `clip_norm`.

    Guarantee: adding or removing one update moves the sum by at most `clip_norm` in L2, up to float64 rounding (about
    1e-16 of the sum). The memory is one vector, however many updates come.
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
            if not tiles.single and surely_within(group[0], self.clip_norm):  # a row of many tiles comes alone
                total += group[0]
                continue
            kept, norms = tiles.finite(group)
            factors = clip_factors(torch.from_numpy(norms), self.clip_norm).numpy()
            for where in tiles.columns():
                total[where] += added_up(tiles.doubles(kept[:, where], factors))

    def noised(self, mechanism: Gaussian, source: RandomSource) -> Tensor:
        """The sum with noise for `clip_norm`, (size,), float64."""
        return mechanism.add_noise(self.total, self.clip_norm, source)


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
