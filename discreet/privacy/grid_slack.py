"""How far noise on the grid can be from exact noise, rounded: a bound for the run's statement of its privacy."""

from __future__ import annotations

import math

from discreet.privacy.grid import BITS


def grid_slack(num_params: int, stddev_in_steps: float, *, bits: int = BITS) -> float:
    """Bound on the total variation distance between `Grid.gaussian` and exact Gaussians, rounded.

    Let S be stddev_in_steps. A value is round(S * R * cos(2 pi t)), or with sin, where R = sqrt(-2 ln u). An
    exact Gaussian has u and t uniform; the one drawn replaces them by the midpoint of their cell, one of
    2^bits * 2^bits equal cells (t has one bit more than that). Both round to the same integer unless a rounding
    boundary R * cos(2 pi t) = c, with c = (k + 1/2) / S for an integer k, cuts the cell. Count those cells:

    - The column u < 2^-bits: 2^bits cells, whatever happens there. A boundary that leaves this column has
      |c| <= R_max = sqrt(2 bits ln 2), and there are at most 2 S R_max + 1 of those.
    - On such a boundary u = exp(-c^2 / (2 cos^2(2 pi t))), monotone in t over each of two quarter turns, and
      the boundary has no point over the other two. A monotone curve cuts at most 2 * 2^bits cells.

    Together at most 2^bits * (8 S R_max + 5) of 4^bits cells. Decimal arithmetic moves the boundaries by less
    than 10^-90, far less than a cell, which is paid for by doubling. A union over the coordinates gives
    num_params * 2 * (8 S R_max + 5) / 2^bits: 1.3e-24 for a million coordinates and S = 2^20.

    AES-256 in counter mode is taken as random.

    Args:
        num_params: coordinates in a release.
        stddev_in_steps: standard deviation of the noise in steps of the grid, >= 0; 0 gives 0.
        bits: of the uniforms. The default is what `Grid.gaussian` has; tests check the bound with few.

    Raises:
        ValueError: if num_params < 0, or stddev_in_steps is negative or not finite.
    """
    largest_radius = math.sqrt(2 * bits * math.log(2))
    return _slack(num_params, stddev_in_steps, cuts=8 * stddev_in_steps * largest_radius + 5, bits=bits)


def laplace_grid_slack(num_params: int, scale_in_steps: float, *, bits: int = BITS) -> float:
    """As `grid_slack`, for `Grid.laplace`: num_params * 2 * (S bits ln 2 + 2) / 2^bits.

    A value is round(S * -ln u) with a sign. For each sign a boundary -ln u = (k + 1/2) / S cuts one cell, and
    outside the cell u < 2^-bits, which counts as cut, there are at most S bits ln 2 + 1 of them.
    """
    return _slack(num_params, scale_in_steps, cuts=scale_in_steps * bits * math.log(2) + 2, bits=bits)


def _slack(num_params: int, scale_in_steps: float, *, cuts: float, bits: int) -> float:
    if num_params < 0 or not 0 <= scale_in_steps < math.inf:
        raise ValueError(f"num_params and noise must be finite and >= 0, not {num_params}, {scale_in_steps}")
    return 0.0 if scale_in_steps == 0 else min(1.0, num_params * 2 * cuts * 2.0**-bits)
