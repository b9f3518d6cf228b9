"""The privacy loss of one release, as masses on a grid of losses: steps 1 and 2 of the proof in docs/accounting.md."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent, LaplaceDpEvent, PoissonSampledDpEvent
from numpy.typing import NDArray
from scipy.special import ndtr

LARGEST_EXPONENT = 700.0  # exp overflows above
_TRUNCATION = 10.0  # standard deviations: the Gaussian mass beyond, 8e-24, counts as infinite loss

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LossMasses:
    """The loss in one direction: ``masses[i]`` at loss (first + i) * interval, ``infinite`` at infinity."""

    first: int
    masses: FloatArray
    infinite: float

    def __post_init__(self) -> None:
        self.masses.setflags(write=False)  # it is kept and shared

    @property
    def last(self) -> int:
        """The largest finite loss, in intervals."""
        return self.first + len(self.masses) - 1


class _Pair(NamedTuple):
    """Step 1: upper = q * noise(mean 1) + (1 - q) * noise(mean 0) against lower = noise(mean 0)."""

    probability: float
    cdf: Callable[[FloatArray], FloatArray]  # of the noise, symmetric around 0
    place: Callable[[FloatArray], FloatArray]  # where log(noise(mean 1) / noise(mean 0)) takes a value
    reach: float  # the grid covers losses of noise(mean 1) against noise(mean 0) from -reach to reach
    bounded: bool  # no loss lies beyond reach


def _pair_of(event: DpEvent) -> _Pair:
    sampled = isinstance(event, PoissonSampledDpEvent)
    probability, noise = (float(event.sampling_probability), event.event) if sampled else (1.0, event)
    match noise:
        case GaussianDpEvent(noise_multiplier=scale):
            reach = (0.5 + _TRUNCATION * scale) / scale**2
            return _Pair(probability, lambda x: ndtr(x / scale), lambda u: scale**2 * u + 0.5, reach, False)
        case LaplaceDpEvent(noise_multiplier=scale):
            cdf = partial(_laplace_cdf, scale)
            return _Pair(probability, cdf, lambda u: (scale * u + 1) / 2, 1 / scale, True)
    raise ValueError(f"accountant 'pld' has no loss distribution for {event}")


def _laplace_cdf(scale: float, x: FloatArray) -> FloatArray:
    tail = 0.5 * np.exp(-np.abs(x) / scale)
    cdf: FloatArray = np.where(x < 0, tail, 1 - tail)
    return cdf


def _sampled_loss(loss: float, probability: float) -> float:
    """log(1 - q + q * exp(loss))."""
    if probability == 1.0:
        return loss
    return float(np.logaddexp(math.log1p(-probability), math.log(probability) + loss))


def _unsampled_loss(losses: FloatArray, probability: float) -> FloatArray:
    """The inverse of ``_sampled_loss``: -inf at and below log(1 - q)."""
    if probability == 1.0:
        return losses
    with np.errstate(divide="ignore"):
        small = np.log(np.maximum(np.expm1(np.minimum(losses, 1.0)) + probability, 0.0))
    large = losses + np.log1p(-(1 - probability) * np.exp(-np.maximum(losses, 1.0)))
    inverse: FloatArray = np.where(losses < 1.0, small, large) - math.log(probability)
    return inverse


def grid_of(event: DpEvent, interval: float) -> tuple[int, int]:
    """The first and the last loss of one release's grid, in intervals."""
    pair = _pair_of(event)
    first = math.floor(_sampled_loss(-pair.reach, pair.probability) / interval)
    last = math.ceil(_sampled_loss(pair.reach, pair.probability) / interval)
    return first, max(last, first + 1)


def _bin_masses(cdf: Callable[[FloatArray], FloatArray], edges: FloatArray) -> FloatArray:
    """The noise's mass between edges, from the nearer tail: small masses keep their relative precision."""
    masses: FloatArray = np.where(edges[1:] <= 0, np.diff(cdf(edges)), -np.diff(cdf(-edges)))
    return np.maximum(masses, 0.0)


@lru_cache(maxsize=64)  # up to four megabytes each; where there are more events, each epsilon computes them anew
def loss_masses(event: DpEvent, interval: float) -> tuple[LossMasses, LossMasses]:
    """The loss of one release when a member is removed, and when one is added. Mass beyond the grid counts as infinite.

    Raises:
        ValueError: an event that is not a Gaussian or Laplace one, Poisson-sampled or not.
    """
    pair = _pair_of(event)
    first, last = grid_of(event, interval)
    losses: FloatArray = interval * np.arange(first, last + 1, dtype=np.float64)
    edges = pair.place(_unsampled_loss(losses, pair.probability))
    if pair.bounded or pair.probability < 1.0:
        edges[0] = -math.inf
    if pair.bounded:
        edges[-1] = math.inf
    lower, shifted = _bin_masses(pair.cdf, edges), _bin_masses(pair.cdf, edges - 1)
    upper = pair.probability * shifted + (1 - pair.probability) * lower
    beyond_lower, beyond_shifted = _beyond(pair.cdf, edges), _beyond(pair.cdf, edges - 1)
    beyond_upper = pair.probability * beyond_shifted + (1 - pair.probability) * beyond_lower
    removed, added = _connect_dots(upper, lower, first, interval)
    return LossMasses(first, removed, beyond_upper), LossMasses(-last, added[::-1], beyond_lower)


def _beyond(cdf: Callable[[FloatArray], FloatArray], edges: FloatArray) -> float:
    outer = np.array([edges[0], -edges[-1]])
    return float(cdf(outer).sum())


def _connect_dots(upper: FloatArray, lower: FloatArray, first: int, interval: float) -> tuple[FloatArray, FloatArray]:
    """Step 2: bin masses split over the bins' ends, under ``upper`` and under ``lower``, such that at every point the
    ratio of the two is the exponential of the point's loss."""
    losses = np.arange(first, first + len(upper)) * interval
    with np.errstate(over="ignore", invalid="ignore"):
        to_right = np.clip((upper - np.exp(losses) * lower) / -math.expm1(-interval), 0.0, upper)
    to_right = np.where(losses < LARGEST_EXPONENT, to_right, upper)  # up is the safe side
    from_upper_to_lower = np.exp(np.minimum(-losses - interval, LARGEST_EXPONENT))
    lower_to_right = np.minimum(to_right * from_upper_to_lower, lower)
    return _points(upper, to_right), _points(lower, lower_to_right)


def _points(masses: FloatArray, to_right: FloatArray) -> FloatArray:
    points = np.zeros(len(masses) + 1)
    points[:-1] += masses - to_right
    points[1:] += to_right
    return points
