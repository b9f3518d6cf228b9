"""The grid on which blocks of patients are added up, at a guarded site and where one is
simulated."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from discreet.privacy.grid import Grid

MOVES = 2  # clip norms by which one patient moves the sum: its block changes, and stays


def blocks_grid(size: int, clip_norm: float, *, blocks: int, noise_multiplier: float) -> Grid:
    """The grid on which blocks' updates (size,) add up exactly, by public values alone. The noise
    multiplier is over 2C."""
    from discreet.privacy.grid import grid_for

    stddev = noise_multiplier * MOVES * clip_norm
    return grid_for(clip_norm, size, largest_cohort=blocks, noise_scale=stddev)
