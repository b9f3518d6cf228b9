"""Epsilon by privacy loss distributions, fast enough to ask after every round.

One release is described by a pair of distributions, ``upper`` (the member takes part: mean 1) and ``lower``
(it does not: mean 0), in units of the sensitivity. The privacy loss is log(upper / lower), distributed as
under ``upper`` when a member is removed, and its negative as under ``lower`` when one is added. Both
directions are put on a grid of losses by Connect the Dots (Doroshenko et al. 2022, arXiv 2207.04380), which
never understates delta; independent losses add, so releases compose by multiplying Fourier transforms
(Koskela et al. 2020, arXiv 1906.03049). dp_accounting does the same and is what the tests compare with; here
the grids and the transforms of an event are computed once, vectorised, and kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent, LaplaceDpEvent, PoissonSampledDpEvent
from numpy.typing import NDArray
from scipy import fft
from scipy.signal import lfilter
from scipy.special import ndtr

FINEST_INTERVAL = 1e-4  # width of the loss grid where memory allows: dp_accounting's default
_MAX_EVENT_POINTS = 2**18  # grid points of one event: above, the grid gets coarser
_MAX_SUM_POINTS = 2**20  # of a composition
_SHORT, _LONG = 2**16, 2**19  # transforms: many short ones and some long ones are kept in memory, none longer
_TRUNCATION = 10.0  # standard deviations: the Gaussian mass beyond, 8e-24, counts as infinite loss
_TAIL_MASS = 1e-15  # tilted mass that may lie outside the window of a composition
_ROUNDING = 5e-6  # part of delta set aside for rounding errors
_POWERS = range(-24, 25)  # powers of two tried as orders in Chernoff's bound
_SMALLEST_TILT = 1e-6  # below, no tilt at all
_LARGEST_EXPONENT = 700.0  # exp overflows above
_SMALLEST_EXPONENT = -60.0  # exp(-60) is nothing beside the rounding errors of a transform

FloatArray = NDArray[np.float64]
Counts = Mapping[DpEvent, int]


@dataclass(frozen=True, eq=False)
class LossMasses:
    """The loss of one release in one direction: ``masses[i]`` at loss (first + i) * interval, ``infinite`` at
    infinity."""

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
    """``upper`` = q * noise(mean 1) + (1 - q) * noise(mean 0) against ``lower`` = noise(mean 0)."""

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


def _grid(event: DpEvent, interval: float) -> tuple[int, int]:
    """The first and the last loss of one release's grid, in intervals."""
    pair = _pair_of(event)
    first = math.floor(_sampled_loss(-pair.reach, pair.probability) / interval)
    last = math.ceil(_sampled_loss(pair.reach, pair.probability) / interval)
    return first, max(last, first + 1)


def _bin_masses(cdf: Callable[[FloatArray], FloatArray], edges: FloatArray) -> FloatArray:
    """The noise's mass between edges, from the nearer tail, so that small masses keep their relative
    precision."""
    masses: FloatArray = np.where(edges[1:] <= 0, np.diff(cdf(edges)), -np.diff(cdf(-edges)))
    return np.maximum(masses, 0.0)


@lru_cache(maxsize=24)
def loss_masses(event: DpEvent, interval: float) -> tuple[LossMasses, LossMasses]:
    """The loss of one release when a member is removed, and when one is added, on a grid of losses.

    The two masses of each bin of the grid, under ``upper`` and ``lower``, are split over the bin's ends so
    that both are kept (Connect the Dots): a delta computed from the ends is at least the true one. Mass
    beyond the grid counts as infinite loss.

    Raises:
        ValueError: an event that is not a Gaussian or Laplace one, Poisson-sampled or not.
    """
    pair = _pair_of(event)
    first, last = _grid(event, interval)
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
    """Bin masses split over the bins' ends, under ``upper`` and under ``lower``, such that in every point the
    ratio of the two is the exponential of the point's loss."""
    losses = np.arange(first, first + len(upper)) * interval
    with np.errstate(over="ignore", invalid="ignore"):
        to_right = np.clip((upper - np.exp(losses) * lower) / -math.expm1(-interval), 0.0, upper)
    to_right = np.where(losses < _LARGEST_EXPONENT, to_right, upper)  # up is the safe side
    from_upper_to_lower = np.exp(np.minimum(-losses - interval, _LARGEST_EXPONENT))
    lower_to_right = np.minimum(to_right * from_upper_to_lower, lower)
    return _points(upper, to_right), _points(lower, lower_to_right)


def _points(masses: FloatArray, to_right: FloatArray) -> FloatArray:
    points = np.zeros(len(masses) + 1)
    points[:-1] += masses - to_right
    points[1:] += to_right
    return points


@lru_cache(maxsize=4096)
def _ends(event: DpEvent, interval: float, direction: int) -> tuple[int, int, float]:
    """First and last loss, in intervals, and infinite mass: kept longer than the masses."""
    loss = loss_masses(event, interval)[direction]
    return loss.first, loss.last, loss.infinite


class _Frame(NamedTuple):
    """How a sum of losses is looked at.

    Under a tilt, the mass at a loss is multiplied by exp(tilt * loss) and divided by the sum: a distribution
    again, but nearer to epsilon. The rounding errors of a Fourier transform are relative to the whole
    distribution; the tilt makes them small beside delta.
    """

    interval: float
    direction: int  # 0: a member is removed, 1: added
    tilt: float


@lru_cache(maxsize=32768)
def _log_moment_of(event: DpEvent, interval: float, direction: int, order: float) -> float:
    """log E[exp(order * loss)] over the finite losses of one release."""
    loss = loss_masses(event, interval)[direction]
    present = np.flatnonzero(loss.masses)
    exponents = (order * interval) * (loss.first + present) + np.log(loss.masses[present])
    largest = exponents.max()
    return float(largest + np.log(np.exp(exponents - largest).sum()))


def _log_moment(counts: Counts, frame: _Frame, order: float) -> float:
    """log E[exp(order * summed loss)] over finite losses, without the tilt."""
    return math.fsum(n * _log_moment_of(e, frame.interval, frame.direction, order) for e, n in counts.items())


def _descend(bound: Callable[[float], float]) -> float:
    """The power of two at which a bound with one minimum is smallest; upward only while it gains a hundredth
    by it."""
    place, best = 4, bound(2.0**4)
    for step, gain in ((1, 0.01), (-1, 0.0)):
        while place + step in _POWERS and (further := bound(2.0 ** (place + step))) < best - gain * abs(best):
            place, best = place + step, further
    return 2.0**place


def _frame_for(counts: Counts, *, interval: float, direction: int, delta: float) -> _Frame:
    """Half of the order at which Chernoff's bound on epsilon is smallest: nearly as precise, and the window
    stays short where a single release can lose much."""
    frame = _Frame(interval, direction, 0.0)
    order = _descend(lambda order: (_log_moment(counts, frame, order) - math.log(delta)) / order)
    return frame._replace(tilt=order / 2)


def _extent(counts: Counts, frame: _Frame, sign: int) -> int:
    """What sign * (summed loss) exceeds, in intervals, with a tilted probability of at most half of
    _TAIL_MASS (Chernoff)."""
    level = math.log(2 / _TAIL_MASS) - _log_moment(counts, frame, frame.tilt)

    def bound(order: float) -> float:
        return (_log_moment(counts, frame, frame.tilt + sign * order) + level) / order

    certain = 0
    for event, count in counts.items():
        first, last, _ = _ends(event, frame.interval, frame.direction)
        certain += count * (last if sign > 0 else -first)
    return min(certain, math.ceil(bound(_descend(bound)) / frame.interval))


def _transform(event: DpEvent, frame: _Frame, length: int) -> tuple[FloatArray, FloatArray]:
    """Logarithm of the modulus, and the phase, of the Fourier transform of one release's tilted loss; loss 0
    at index 0."""
    loss = loss_masses(event, frame.interval)[frame.direction]
    present = np.flatnonzero(loss.masses)
    steps = loss.first + present
    log_moment = _log_moment_of(event, frame.interval, frame.direction, frame.tilt)
    tilted = np.exp(np.log(loss.masses[present]) + frame.tilt * frame.interval * steps - log_moment)
    spectrum = fft.rfft(np.bincount(steps % length, weights=tilted, minlength=length))
    with np.errstate(divide="ignore"):
        return np.log(np.abs(spectrum)), np.angle(spectrum)


_short_transform = lru_cache(maxsize=256)(_transform)  # half a megabyte each
_long_transform = lru_cache(maxsize=40)(_transform)  # four megabytes each


def _tilted_sum(counts: Counts, frame: _Frame, length: int) -> FloatArray:
    """The tilted masses of the summed loss, loss 0 at index 0, circular."""
    transform = _short_transform if length <= _SHORT else _long_transform if length <= _LONG else _transform
    log_modulus, phase = np.zeros(length // 2 + 1), np.zeros(length // 2 + 1)
    for event, count in counts.items():
        log_modulus_once, phase_once = transform(event, frame, length)
        log_modulus += count * log_modulus_once
        phase += count * phase_once
    spectrum = np.zeros(len(phase), dtype=np.complex128)
    heard = log_modulus > _SMALLEST_EXPONENT
    spectrum[heard] = np.exp(log_modulus[heard] + 1j * phase[heard])
    masses: FloatArray = np.maximum(fft.irfft(spectrum, length), 0.0)
    return masses


def _round_up(points: int) -> int:
    """The next power of two, or three quarters of one, so that a growing count seldom changes the transform's
    length."""
    power = 1 << max(points - 1, 3).bit_length()
    return 3 * power // 4 if points <= 3 * power // 4 else power


def _epsilon_in(counts: Counts, frame: _Frame, delta: float) -> float:
    """Epsilon in one direction.

    The transform is circular: tilted mass from outside the window, at most _TAIL_MASS, appears inside it,
    which adds to delta; what it leaves out above the window is added to the infinite mass. Where epsilon lies
    below the window, a smaller tilt finds it.
    """
    low, high = -_extent(counts, frame, -1), _extent(counts, frame, 1)
    if high - low > _MAX_SUM_POINTS:
        return math.inf  # only with a smaller tilt, after very many releases: what was found before stands
    tilted = _tilted_sum(counts, frame, _round_up(high - low + 1))
    log_moment = _log_moment(counts, frame, frame.tilt)
    start = max(low, _first_representable(frame, log_moment), 0)
    losses: FloatArray = frame.interval * np.arange(start, max(high, start) + 1, dtype=np.float64)
    untilt = np.exp(np.minimum(log_moment - frame.tilt * losses, _LARGEST_EXPONENT))
    masses = np.roll(tilted, -start)[: len(losses)] * untilt
    infinite = _TAIL_MASS * float(untilt[-1]) + _infinite_mass(counts, frame)
    epsilon = _epsilon_from_masses(losses, masses, infinite, delta=delta)
    if start == 0 or frame.tilt == 0 or epsilon > losses[0]:
        return epsilon
    smaller = frame._replace(tilt=frame.tilt / 16 if frame.tilt > _SMALLEST_TILT else 0.0)
    return min(epsilon, _epsilon_in(counts, smaller, delta))


def _first_representable(frame: _Frame, log_moment: float) -> int:
    """The smallest loss, in intervals, at which taking the tilt back does not overflow."""
    if frame.tilt == 0:
        return 0
    return math.ceil((log_moment - _LARGEST_EXPONENT) / (frame.tilt * frame.interval))


def _infinite_mass(counts: Counts, frame: _Frame) -> float:
    masses = ((n, _ends(event, frame.interval, frame.direction)[2]) for event, n in counts.items())
    return -math.expm1(math.fsum(n * math.log1p(-infinite) for n, infinite in masses))


def _epsilon_from_masses(losses: FloatArray, masses: FloatArray, infinite: float, *, delta: float) -> float:
    """The smallest epsilon with infinite + sum over losses > epsilon of mass * (1 - exp(epsilon - loss)) at
    most delta, among those that are not below the first loss of the evenly spaced grid."""
    ratio = math.exp(losses[0] - losses[1]) if len(losses) > 1 else 1.0
    downward = masses[::-1]
    at_least = infinite + np.cumsum(downward)[::-1]  # mass at or above each loss
    discounted = lfilter([1.0], [1.0, -ratio], downward)[::-1]  # mass * exp(loss here - its loss), likewise
    too_much = np.flatnonzero(at_least - discounted > delta)  # the difference is the delta at each loss
    index = int(too_much[-1]) + 1 if len(too_much) else 0
    if index == len(losses):
        return math.inf
    excess = at_least[index] - delta
    if index == 0 or excess <= 0:
        return float(losses[index])
    return float(losses[index] + math.log(excess / discounted[index]))


def _interval_for(counts: Counts, delta: float) -> float:
    """The finest interval, FINEST_INTERVAL times a power of two, at which every grid is short enough."""
    interval = FINEST_INTERVAL
    while not _fits(counts, interval, delta):
        interval *= 2
    return interval


def _fits(counts: Counts, interval: float, delta: float) -> bool:
    grids = [_grid(event, interval) for event in counts]
    if max(last - first for first, last in grids) >= _MAX_EVENT_POINTS:
        return False
    frames = _frames(counts, interval, delta)
    return max(_extent(counts, frame, 1) + _extent(counts, frame, -1) for frame in frames) < _MAX_SUM_POINTS


def _frames(counts: Counts, interval: float, delta: float) -> list[_Frame]:
    """A frame for each direction; without sampling the two are mirror images, and one will do."""
    directions = (0, 1) if any(isinstance(event, PoissonSampledDpEvent) for event in counts) else (0,)
    return [_frame_for(counts, interval=interval, direction=direction, delta=delta) for direction in directions]


def composed_epsilon(counts: Counts, *, delta: float) -> float:
    """Epsilon at ``delta`` of all releases together, rounded up.

    Never below the true value: the grid, the truncation and the window err upward, and 5 parts in a million
    of delta are set aside for the rounding errors of the transforms, which stayed below 2 in every published
    setting of the reference table.

    ``counts`` maps Gaussian and Laplace events, Poisson-sampled or not, to how often they were released.
    Adjacency: add or remove one member, or, where no event is sampled, whatever adjacency the sensitivities
    were taken under. 0 where ``counts`` is empty; inf where delta is below the mass at infinite loss (8e-24 a
    release).

    Raises:
        ValueError: an event of another kind.
    """
    if not counts:
        return 0.0
    delta *= 1 - _ROUNDING
    interval = _interval_for(counts, delta)
    return max(_epsilon_in(counts, frame, delta) for frame in _frames(counts, interval, delta))
