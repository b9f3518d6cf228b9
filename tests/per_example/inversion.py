"""Delta of composed releases by inverting the transform of their privacy loss: an oracle without grids or FFTs.

With M(s) = E[exp(s * loss)], delta(epsilon) = E[(1 - exp(epsilon - loss))+] is the integral of
M(s) * exp(-s * epsilon) / (s * (s + 1)) / (2 pi i) over a contour to the right of 0 (Bromwich). It crosses the real
axis at the saddle point, where nothing cancels, so that delta is right relative to itself, and bends to the right,
where exp(-s * epsilon) is small. M of a composition is the product over the releases; of one release it is a sum over
points so dense that it converges exponentially.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent, LaplaceDpEvent, PoissonSampledDpEvent
from numpy.typing import NDArray
from scipy.stats import norm

Complex = NDArray[np.complex128]
Real = NDArray[np.float64]
Counts = Mapping[DpEvent, int]

NEGLIGIBLE = 1e-17  # of the integrand at the saddle point
PER_WIDTH = 12  # points of the contour in a standard deviation of the integrand
MOST_POINTS = 2**13
MOST_TERMS = 2**22


class TooWideError(ValueError):
    """The integrand falls so slowly that this oracle has no answer."""


def delta_of(counts: Counts, epsilon: float, *, per_width: int = PER_WIDTH, bend: float | None = None) -> float:
    """The larger delta of removing and adding a member.

    `bend` is how far the contour leans: it decides nothing but the precision. Right to about 1e-12 of delta.
    """
    if bend is None:  # bounded losses grow to the right where epsilon is below the largest one
        bend = 0.0 if any(isinstance(_noise(event), LaplaceDpEvent) for event in counts) else 0.5
    return max(_inverted(counts, epsilon, removed=removed, per_width=per_width, bend=bend) for removed in (True, False))


def _inverted(counts: Counts, epsilon: float, *, removed: bool, per_width: int, bend: float) -> float:
    def log_integrand(s: Complex, reach: float) -> Complex:
        with np.errstate(over="ignore", invalid="ignore"):
            moments = sum(n * _log_moment(e, s, removed=removed, reach=reach) for e, n in counts.items())
        return np.asarray(moments - s * epsilon - np.log(s) - np.log(s + 1), dtype=np.complex128)

    saddle, width = _saddle(lambda c: log_integrand(c.astype(np.complex128), 0.0).real)
    top = float(log_integrand(np.array([saddle + 0j]), 0.0).real[0])
    step, count = width / per_width, 64
    while True:
        y = step * np.arange(count)
        lean = np.sqrt(1 + (y / width) ** 2)
        s = saddle + bend * width * (lean - 1) + 1j * y
        with np.errstate(over="ignore", invalid="ignore"):
            values = np.exp(log_integrand(s, float(y[-1])) - top)
        if not np.isfinite(values).all() or count > MOST_POINTS:
            raise TooWideError
        if np.abs(values[-8:]).max() < NEGLIGIBLE:
            break
        count *= 2
    slope = bend * (y / width) / lean + 1j
    parts = (values * slope).imag
    parts[0] /= 2
    total = float(parts.sum()) * step / math.pi
    return math.exp(top) * total


def _saddle(log_integrand: Callable[[Real], Real]) -> tuple[float, float]:
    """The place on the real axis at which the integrand is least, and its width there."""
    low, middle, high = 2.0**-12, 2.0**-11, 2.0**-10
    while log_integrand(np.array([middle])) > log_integrand(np.array([high])):
        low, middle, high = middle, high, 2 * high
    for _ in range(6):
        points = np.linspace(low, high, 9)
        best = int(np.clip(np.argmin(np.nan_to_num(log_integrand(points), nan=np.inf)), 1, 7))
        low, middle, high = points[best - 1 : best + 2]
    left, least, right = log_integrand(middle * np.array([0.99, 1.0, 1.01]))
    if not left - 2 * least + right > 0:
        raise TooWideError
    return middle, float(0.01 * middle * (left - 2 * least + right) ** -0.5)


def _noise(event: DpEvent) -> DpEvent:
    return event.event if isinstance(event, PoissonSampledDpEvent) else event


def _log_moment(event: DpEvent, s: Complex, *, removed: bool, reach: float) -> Complex:
    """log E[exp(s * loss)] of one release; `reach` is the largest imaginary part of `s`."""
    noise, scale = _noise(event), _noise(event).noise_multiplier
    if isinstance(event, GaussianDpEvent):
        return s * (s + 1) / (2 * scale**2)
    q = event.sampling_probability if isinstance(event, PoissonSampledDpEvent) else 1.0
    points, weights = (_laplace_points if isinstance(noise, LaplaceDpEvent) else _gaussian_points)(
        scale, float(s.real.max()), reach
    )
    loss = np.logaddexp(np.log1p(-q), np.log(q) + points) if q < 1 else points
    if len(loss) * len(s) > MOST_TERMS:
        raise TooWideError
    order = s + 1 if removed else -s
    parts = np.array_split(order, 1 + len(loss) * len(s) // 2**20)
    return np.log1p(np.concatenate([np.expm1(np.multiply.outer(part, loss)) @ weights for part in parts]))


def _gaussian_points(scale: float, order: float, reach: float) -> tuple[Real, Real]:
    """log(mean 1 / mean 0) at evenly spaced values of the noise of mean 0, and their probabilities."""
    step = min(scale / 6, scale**2 / 4, math.pi / (reach / scale**2 + 16 / scale))
    if order + 24 * scale > MOST_TERMS * step:
        raise TooWideError
    x = np.arange(-12 * scale - 1, order + 2 + 12 * scale, step)
    return (x - 0.5) / scale**2, step * norm.pdf(x, scale=scale)


def _laplace_points(scale: float, order: float, reach: float) -> tuple[Real, Real]:
    """The same for Laplace noise: two ends, beyond which the loss stays what it is, and Gauss points between."""
    nodes, weights = np.polynomial.legendre.leggauss(64 + 2 * math.ceil(reach / scale))
    x = (nodes + 1) / 2
    between = weights / 2 * np.exp(-x / scale) / (2 * scale)
    ends = [0.5, 0.5 * math.exp(-1 / scale)]
    return np.array([-1 / scale, *((2 * x - 1) / scale), 1 / scale]), np.array([ends[0], *between, ends[1]])
