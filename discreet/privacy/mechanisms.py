"""The Gaussian and the Laplace mechanism: noise for a sensitivity, and the privacy event of a
release."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from discreet.accounting.events import check_noise_multiplier, check_positive, poisson_round_event
from discreet.privacy.grid import Grid, check_finite
from discreet.privacy.randomness import RandomSource

if TYPE_CHECKING:
    from dp_accounting import DpEvent

GRID = "grid"
# Draws behind a value of the other kinds of noise; 4 is the secure mode of `RandomSource.normal`.
DRAWS = {"float": 1, "secure_sum": 4}
# Adds noise of a stddev or scale to a total.
Draw = Callable[[Tensor, float, RandomSource], Tensor]


@dataclass(frozen=True)
class Gaussian:
    """The Gaussian mechanism: noise of stddev noise_multiplier * (L2 sensitivity) on each
    coordinate.

    A noise multiplier of 0 protects nobody: its event has infinite epsilon. `noise` is "grid", or
    how noise is added to a sum in floating point without rounding: "float", or "secure_sum", the
    sum of four draws. With `in_place` a noised sum may take the memory of the sum, also if an error
    is raised.
    """

    noise_multiplier: float
    noise: str = GRID
    in_place: bool = False

    def __post_init__(self) -> None:
        check_noise_multiplier(self.noise_multiplier)

    def stddev(self, sensitivity: float) -> float:
        """Standard deviation of the noise for an L2 `sensitivity` > 0, in its units; 0 without
        noise."""
        return _noise_for(sensitivity, self.noise_multiplier)

    def add_noise(self, total: Tensor, sensitivity: float, source: RandomSource) -> Tensor:
        """`total` (any shape, float32 or float64) plus noise for `sensitivity`, of the same shape
        and type.

        Between neighbouring datasets `total` must change by at most `sensitivity` in L2: C for a
        sum of vectors clipped to C if one is added or removed, 2C if one is replaced. With "grid"
        the noised sum is rounded (`rounded_gaussian`); without, its low bits can still tell
        something about `total` (Mironov 2012). Raises ValueError: `total` is not finite, or the
        noise is out of range for its type; TypeError: another type.
        """
        if self.noise == GRID:
            from discreet.privacy.rounded_sums import rounded_gaussian  # not in a guard's process

            draw: Draw = partial(rounded_gaussian, in_place=self.in_place)
        else:
            draw = self._unrounded
        return _noised(total, self.stddev(sensitivity), draw, source)

    def add_grid_noise(
        self, total: Tensor, sensitivity: float, *, grid: Grid, source: RandomSource
    ) -> Tensor:
        """`total`, int64 steps of `grid`, plus noise rounded to steps. `sensitivity` is in the
        units of the data; the standard deviation is rounded up.

        It has the guarantee of `add_noise`, with a slack in delta given by `grid_slack`.
        """
        stddev = _rounded_up(total, self.stddev(sensitivity))
        noise = grid.gaussian(total.numel(), stddev, source)
        return noise.reshape(total.shape).to(total.device).add_(total)

    def _unrounded(self, total: Tensor, stddev: float, source: RandomSource) -> Tensor:
        check_finite(total)
        noise = source.normal(
            total.numel(),
            stddev=stddev,
            draws=DRAWS[self.noise],
            dtype=total.dtype,
            device=total.device,
        )
        return noise.reshape(total.shape).add_(total)

    def event(self) -> DpEvent:
        """The event of one release."""
        return poisson_round_event(1.0, noise_multiplier=self.noise_multiplier)


@dataclass(frozen=True)
class Laplace:
    """The Laplace mechanism: noise of scale noise_multiplier * (L1 sensitivity) on each coordinate.

    One release is (1 / noise_multiplier)-differentially private, with delta = 0. A multiplier of 0
    protects nobody."""

    noise_multiplier: float

    def __post_init__(self) -> None:
        check_noise_multiplier(self.noise_multiplier)

    def scale(self, sensitivity: float) -> float:
        """Scale of the noise for an L1 `sensitivity` > 0; its standard deviation is sqrt(2) times
        that."""
        return _noise_for(sensitivity, self.noise_multiplier)

    def add_noise(self, total: Tensor, sensitivity: float, source: RandomSource) -> Tensor:
        """`total` plus noise for an L1 `sensitivity`, rounded as by `rounded_laplace`; otherwise as
        `Gaussian.add_noise`."""
        from discreet.privacy.rounded_sums import rounded_laplace

        return _noised(total, self.scale(sensitivity), rounded_laplace, source)

    def add_grid_noise(
        self, total: Tensor, sensitivity: float, *, grid: Grid, source: RandomSource
    ) -> Tensor:
        """`total` steps plus rounded noise for an L1 `sensitivity`; otherwise as
        `Gaussian.add_grid_noise`."""
        scale = _rounded_up(total, self.scale(sensitivity))
        noise = grid.laplace(total.numel(), scale, source)
        return noise.reshape(total.shape).to(total.device).add_(total)

    def event(self) -> DpEvent:
        """The event of one release."""
        from dp_accounting import LaplaceDpEvent, NonPrivateDpEvent

        if self.noise_multiplier:
            return LaplaceDpEvent(self.noise_multiplier)
        return NonPrivateDpEvent()


def analytic_gaussian_noise_multiplier(epsilon: float, *, delta: float) -> float:
    """The least noise multiplier with which one Gaussian release is (epsilon, delta)-differentially
    private.

    Solves Phi(1/(2z) - epsilon z) - exp(epsilon) Phi(-1/(2z) - epsilon z) = delta for z (Balle and
    Wang 2018, Theorem 8 and Algorithm 1); the classical sqrt(2 ln(1.25/delta)) / epsilon is wrong
    above epsilon = 1. The result errs upwards, by less than one part in 10^9. Raises ValueError:
    epsilon outside [0, inf), delta outside (0, 1).

    >>> round(analytic_gaussian_noise_multiplier(1.0, delta=1e-5), 4)
    3.7306
    """
    if not 0 <= epsilon < math.inf:
        raise ValueError(f"epsilon must be in [0, inf), not {epsilon}")
    if not 0 < delta < 1:
        raise ValueError(f"delta must be in (0, 1), not {delta}")
    from dp_accounting import get_sigma_gaussian

    root = float(get_sigma_gaussian(epsilon, delta, tol=1e-12))
    return root * (1 + 1e-10) + 2e-12  # the root is off by one tolerance to either side


def _noise_for(sensitivity: float, noise_multiplier: float) -> float:
    if noise_multiplier == 0:
        return 0.0
    check_positive("sensitivity", sensitivity)
    return noise_multiplier * sensitivity


def _noised(total: Tensor, scale: float, draw: Draw, source: RandomSource) -> Tensor:
    if total.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"total must be float32 or float64, not {total.dtype}")
    span = torch.finfo(total.dtype)
    if scale == 0:
        check_finite(total)
        return total.clone()
    if not span.tiny * 64 < scale < span.max / 64:
        raise ValueError(
            f"noise of size {scale} is out of range for {total.dtype}: it would vanish or overflow"
        )
    return draw(total, scale, source)


def _rounded_up(total: Tensor, scale: float) -> float:
    """A scale of noise on steps of a grid, rounded up; 0 stays 0. TypeError: `total` is not in
    steps."""
    if total.dtype != torch.int64:
        raise TypeError(f"total must be int64 on a grid, not {total.dtype}")
    if scale == 0:
        return 0.0
    return math.nextafter(scale, math.inf)
