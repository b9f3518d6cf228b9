"""Mechanisms on an integer grid: exact sums and rounded noise, so that floating point has nothing to leak.

Mironov (2012, "On significance of the least significant bits for differential privacy") showed that the low
bits of a noised floating-point number tell which sums can have produced it. Here every update is truncated to
multiples of a public step, the sum is exact in int64, and the noise added to it is a Gaussian rounded to the
same multiples. For an integer sum s and a real Gaussian X, s + round(X) = round(s + X): the release is the
exact Gaussian mechanism followed by a rounding, so its accounting holds unchanged, sampling included. What is
left, the chance that a drawn value is not the rounding of an exact Gaussian, is bounded by `grid_slack`. The
same holds for Laplace noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from discreet.privacy.randomness import CHUNK, RandomSource
from discreet.privacy.rounded_noise import BITS, LARGEST_SCALE, rounded_laplace, rounded_normal

FINENESS = 2**10  # steps in C / sqrt(num_params), at least: truncation moves an update by less than C / 1000
LARGEST_CLIP = 2**26  # in steps: the float64 sum of squares below is exact up to 2^53
LARGEST_TOTAL = 2.0**62  # in steps: half of what int64 holds


@dataclass(frozen=True)
class Grid:
    """The multiples of `step`, a power of two, so that dividing and multiplying by it is exact in float."""

    step: float

    def __post_init__(self) -> None:
        if not 2.0**-1000 <= self.step <= 2.0**1000 or math.frexp(self.step)[0] != 0.5:
            raise ValueError(f"step must be a power of two in [2^-1000, 2^1000], not {self.step}")

    def quantise(self, update: Tensor, norm_clip: float | None = None, *, order: int = 2) -> Tensor:
        """`update` in whole steps, truncated towards zero: any shape and floating-point type to int64.

        No coordinate grows, so no norm does. With `norm_clip` the result is also held to it in exact
        arithmetic, whatever rounding `update` went through before: the sum of squares is at most
        floor((norm_clip / step)^2), for order 1 the sum of absolute values at most floor(norm_clip / step).
        So adding or removing one update moves a sum by at most norm_clip, exactly. An update over it is
        scaled down to it, so this clips too.

        Raises:
            TypeError: if update is not of a floating-point type.
            ValueError: if update has a value that is not finite or reaches 2^62 steps, norm_clip is not in
                (0, 2^26 steps], or order is not 1 or 2.

        >>> Grid(0.25).quantise(torch.tensor([0.99, -0.99, 0.1]))
        tensor([ 3, -3,  0])
        """
        if order not in (1, 2):
            raise ValueError(f"order must be 1 or 2, not {order}")
        if norm_clip is not None and not 0 < norm_clip <= LARGEST_CLIP * self.step:
            raise ValueError(f"norm_clip must be in (0, {LARGEST_CLIP * self.step}] on this grid, not {norm_clip}")
        whole, power_sum = self._truncate(update, order)
        if norm_clip is None or power_sum <= math.floor(Fraction(norm_clip / self.step) ** order):
            return whole
        norm = float(torch.linalg.vector_norm(update.double() / self.step, order)) * self.step
        # The norm is right to 1e-12, less than 2^-36: this truncation is below norm_clip for certain.
        return self.quantise(update.double() * (norm_clip / norm * (1 - 2.0**-36)), norm_clip, order=order)

    def gaussian(self, count: int, stddev: float, source: RandomSource) -> Tensor:
        """`count` Gaussians of `stddev` (in the units of the data), rounded to steps: int64, (count,).

        Each is the correct rounding of a Gaussian made from two 127-bit uniforms (see `grid_slack`), so that
        a seeded source gives the same noise on every machine. A stddev of 0 gives zeros.

        Raises:
            ValueError: if stddev is not in [0, 2^32 steps].
        """
        return rounded_normal(count, stddev / self.step, source)

    def laplace(self, count: int, scale: float, source: RandomSource) -> Tensor:
        """`count` Laplace values of `scale` (in the units of the data): otherwise as `gaussian`."""
        return rounded_laplace(count, scale / self.step, source)

    def to_float(self, steps: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Whole steps in the units of the data: exact up to 2^53 steps, then rounded once to `dtype`."""
        return (steps.double() * self.step).to(dtype)

    def _truncate(self, update: Tensor, order: int) -> tuple[Tensor, float]:
        """`update` in whole steps, and the sum of |steps|^order, exact below 2^53."""
        if not update.is_floating_point():
            raise TypeError(f"update must be floating point, not {update.dtype}")
        flat = update.detach().reshape(-1)
        whole = torch.empty(len(flat), dtype=torch.int64, device=flat.device)
        power_sum = 0.0
        for start in range(0, len(flat), CHUNK):
            steps = flat[start : start + CHUNK].double().mul_(1 / self.step).trunc_()
            if not float(steps.abs().max()) < LARGEST_TOTAL:
                raise ValueError(f"update must be finite and below {LARGEST_TOTAL * self.step}")
            whole[start : start + CHUNK] = steps
            power_sum += float(torch.dot(steps, steps) if order == 2 else steps.abs_().sum())
        return whole.reshape(update.shape), power_sum


def grid_for(norm_clip: float, num_params: int, *, largest_cohort: int = 2**20, noise_scale: float = 0.0) -> Grid:
    """The grid for updates of norm at most `norm_clip` with `num_params` coordinates.

    The step is the largest power of two that is at most norm_clip / (1024 * sqrt(num_params)). Truncation
    moves an update by less than step * sqrt(num_params) <= norm_clip / 1024 in L2 norm. Where noise of
    `noise_scale` (its standard deviation or scale) would be more than 2^31 of these steps, they are made larger:
    what truncation then costs is far below the noise. The step depends on nothing but public values.

    Raises:
        ValueError: if norm_clip is not finite and > 0, num_params not in [1, 2^30], largest_cohort < 1, or
            the sum of largest_cohort updates and the largest noise could overflow int64.

    >>> grid_for(1.0, 10_000).step == 2.0**-17
    True
    """
    if not 0 < norm_clip < math.inf:
        raise ValueError(f"norm_clip must be finite and > 0, not {norm_clip}")
    if not 1 <= num_params <= 2**30:
        raise ValueError(f"num_params must be in [1, 2^30], not {num_params}")
    if largest_cohort < 1:
        raise ValueError(f"largest_cohort must be >= 1, not {largest_cohort}")
    if not 0 <= noise_scale < math.inf:
        raise ValueError(f"noise_scale must be finite and >= 0, not {noise_scale}")
    step = math.ldexp(0.5, math.frexp(norm_clip / (FINENESS * math.sqrt(num_params)))[1])
    grid = Grid(max(step, math.ldexp(1.0, math.frexp(2 * noise_scale / LARGEST_SCALE)[1]) if noise_scale else step))
    if largest_cohort * (norm_clip / grid.step) + 128 * LARGEST_SCALE > LARGEST_TOTAL:
        raise ValueError(f"largest_cohort={largest_cohort} updates of {num_params} params could overflow int64")
    return grid


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


def delta_with_slack(delta: float, slack: float, *, epsilon: float, releases: int = 1) -> float:
    """delta of `releases` releases on a grid that would be (epsilon, delta)-private together with exact noise.

    delta + (1 + exp(epsilon)) * r, r = releases * slack: exact and drawn noise differ with a chance of at most
    r, whatever the data, so that for neighbours P and P', P(drawn in A) <= P(exact in A) + r
    <= exp(epsilon) * P'(exact in A) + delta + r, and P'(exact in A) <= P'(drawn in A) + r. At most 1, which
    says nothing.
    """
    return min(1.0, delta + (1 + math.exp(min(epsilon, 700.0))) * releases * slack)


def _slack(num_params: int, scale_in_steps: float, *, cuts: float, bits: int) -> float:
    if num_params < 0 or not 0 <= scale_in_steps < math.inf:
        raise ValueError(f"num_params and noise must be finite and >= 0, not {num_params}, {scale_in_steps}")
    return 0.0 if scale_in_steps == 0 else min(1.0, num_params * 2 * cuts * 2.0**-bits)
