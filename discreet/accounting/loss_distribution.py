"""Epsilon by privacy loss distributions: the proof in docs/accounting.md, step by step.

Values that depend on a single event are computed once and cached, so that epsilon can be asked for
after every round. All rounding is upwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent, LaplaceDpEvent, PoissonSampledDpEvent
from numpy.typing import NDArray
from scipy import fft
from scipy.signal import lfilter
from scipy.special import ndtr

FINEST_INTERVAL = 1e-4  # width of the loss grid where memory allows: dp_accounting's default
_MAX_EVENT_POINTS = 2**18  # most grid points of one event; with more, the grid gets coarser
_MAX_SUM_POINTS = 2**20  # most grid points of a composition
_TAIL_MASS = 1e-15  # tilted mass that may lie outside the window of a composition
_ROUNDING = 5e-6  # share of delta set aside for rounding errors that are relative to the masses
# share of delta that rounding errors of the transforms may hide before another tilt is tried
_LARGEST_HIDDEN = 1e-4
_UNIT = 2.0**-53  # largest relative error of an operation in float64
_POWERS = range(-24, 25)  # powers of two tried as orders in Chernoff's bound
_SMALLEST_TILT = 1e-6  # a smaller tilt is taken as none
_SMALLEST_EXPONENT = -60.0  # exp(-60) is negligible beside the rounding errors of a transform
_LARGEST_EXPONENT = 700.0  # above, exp overflows
# in standard deviations; the Gaussian mass beyond, 8e-24, counts as infinite loss
_TRUNCATION = 10.0

Counts = Mapping[DpEvent, int]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LossMasses:
    """The distribution of the loss in one direction: ``masses[i]`` at loss (first + i) * interval,
    ``infinite`` at infinity."""

    first: int
    masses: FloatArray
    infinite: float

    def __post_init__(self) -> None:
        self.masses.setflags(write=False)  # the array is cached and shared


@dataclass(frozen=True)
class ReplacedGaussianDpEvent(DpEvent):  # type: ignore[misc]  # dp_accounting has no types
    """A release of sampled blocks, one of which stays when its data change: with a secret
    probability q it adds u, else 0, to a sum with Gaussian noise; |u| <= C and |u'| <= C for its
    neighbour.

    Step 1 for it: P = q N(C) + (1 - q) N(0) against Q = q N(-C) + (1 - q) N(0), which dominates all
    pairs of u and u' (docs/accounting.md). It is never charged: `noise_multiplier` is that of the
    charged event, the noise over 2C.
    """

    sampling_probability: float
    noise_multiplier: float

    @property
    def shift(self) -> float:
        """C in standard deviations of the noise."""
        return 0.5 / self.noise_multiplier

    def loss(self, place: float) -> float:
        """The loss where the output is so many standard deviations above 0; odd and increasing."""
        q = self.sampling_probability
        exponents = [sign * self.shift * place - self.shift**2 / 2 for sign in (1, -1)]
        logs = [float(np.logaddexp(math.log1p(-q), math.log(q) + each)) for each in exponents]
        return logs[0] - logs[1]

    def places(self, losses: FloatArray) -> FloatArray:
        """The places at which losses are taken: y = exp(shift * place) solves
        b y^2 + a (1 - e^L) y - b e^L = 0, with a = 1 - q and b = q exp(-shift^2 / 2)."""
        size = np.abs(losses)
        a = 1 - self.sampling_probability
        log_b = math.log(self.sampling_probability) - self.shift**2 / 2
        linear = -a * np.expm1(-size)
        root = np.sqrt(linear**2 + 4 * np.exp(2 * log_b - size))
        with np.errstate(divide="ignore"):
            logs = size - math.log(2) - log_b + np.log(linear + root)
        return np.where(losses == 0, 0.0, np.sign(losses) * logs / self.shift)


class _Pair(NamedTuple):
    """Step 1: upper = q * noise(mean 1) + (1 - q) * noise(mean 0) against lower = noise(mean 0)."""

    probability: float
    cdf: Callable[[FloatArray], FloatArray]  # of the noise, symmetric around 0
    # the place where log(noise(mean 1) / noise(mean 0)) takes a value
    place: Callable[[FloatArray], FloatArray]
    # The grid covers losses of noise(mean 1) against noise(mean 0) from -reach to reach.
    reach: float
    bounded: bool  # no loss lies beyond reach


def _pair_of(event: DpEvent) -> _Pair:
    sampled = isinstance(event, PoissonSampledDpEvent)
    probability, noise = (
        (float(event.sampling_probability), event.event) if sampled else (1.0, event)
    )
    match noise:
        case GaussianDpEvent(noise_multiplier=scale):
            reach = (0.5 + _TRUNCATION * scale) / scale**2
            return _Pair(
                probability, lambda x: ndtr(x / scale), lambda u: scale**2 * u + 0.5, reach, False
            )
        case LaplaceDpEvent(noise_multiplier=scale):

            def cdf(x: FloatArray) -> FloatArray:
                tail = 0.5 * np.exp(-np.abs(x) / scale)
                return np.where(x < 0, tail, 1 - tail)  # type: ignore[no-any-return]

            return _Pair(probability, cdf, lambda u: (scale * u + 1) / 2, 1 / scale, True)
    raise ValueError(f"accountant 'pld' has no loss distribution for {event}")


def _unsampled_loss(losses: FloatArray, probability: float) -> FloatArray:
    """The inverse of log(1 - q + q * exp(loss)): -inf at and below log(1 - q)."""
    if probability == 1.0:
        return losses
    with np.errstate(divide="ignore"):
        small = np.log(np.maximum(np.expm1(np.minimum(losses, 1.0)) + probability, 0.0))
    large = losses + np.log1p(-(1 - probability) * np.exp(-np.maximum(losses, 1.0)))
    inverse: FloatArray = np.where(losses < 1.0, small, large) - math.log(probability)
    return inverse


def grid_of(event: DpEvent, interval: float) -> tuple[int, int]:
    """The first and the last loss on the grid of one release, in intervals."""
    if isinstance(event, ReplacedGaussianDpEvent):
        last = math.ceil(event.loss(event.shift + _TRUNCATION) / interval)
        return -last, last
    pair = _pair_of(event)
    low = -pair.reach
    high = pair.reach
    if (q := pair.probability) < 1:
        low, high = (
            float(np.logaddexp(math.log1p(-q), math.log(q) + loss)) for loss in (low, high)
        )
    first = math.floor(low / interval)
    return first, max(math.ceil(high / interval), first + 1)


def _bin_masses(cdf: Callable[[FloatArray], FloatArray], edges: FloatArray) -> FloatArray:
    """The noise's mass between edges in rising order, computed from the nearer tail so that small
    masses keep their relative precision."""
    left = int(np.searchsorted(edges[1:], 0.0, side="right"))
    from_left = np.diff(cdf(edges[: left + 1]))
    from_right = -np.diff(cdf(-edges[left:]))
    masses: FloatArray = np.concatenate([from_left, from_right])
    return np.maximum(masses, 0.0, out=masses)


@lru_cache(maxsize=64)  # up to four megabytes each
def loss_masses(event: DpEvent, interval: float) -> tuple[LossMasses, LossMasses]:
    """The loss distributions of one release if a member is removed, and if one is added. Mass
    beyond the grid counts as infinite loss.
    """
    first, last = grid_of(event, interval)
    losses: FloatArray = interval * np.arange(first, last + 1, dtype=np.float64)
    if isinstance(event, ReplacedGaussianDpEvent):
        return _replaced_masses(event, losses, interval)
    pair = _pair_of(event)
    edges = pair.place(_unsampled_loss(losses, pair.probability))
    if pair.bounded or pair.probability < 1.0:
        edges[0] = -math.inf
    if pair.bounded:
        edges[-1] = math.inf
    lower = _bin_masses(pair.cdf, edges)
    shifted = _bin_masses(pair.cdf, edges - 1)
    upper = pair.probability * shifted + (1 - pair.probability) * lower
    beyond_lower, beyond_shifted = (
        float(pair.cdf(np.array([each[0], -each[-1]])).sum()) for each in (edges, edges - 1)
    )
    beyond_upper = pair.probability * beyond_shifted + (1 - pair.probability) * beyond_lower
    removed, added = _connect_dots(upper, lower, first, interval)
    return LossMasses(first, removed, beyond_upper), LossMasses(-last, added[::-1], beyond_lower)


def _replaced_masses(
    event: ReplacedGaussianDpEvent, losses: FloatArray, interval: float
) -> tuple[LossMasses, LossMasses]:
    """`loss_masses` where a block is replaced: by symmetry both directions are the same."""
    edges = event.places(losses)
    q = event.sampling_probability
    undrawn, above, below = (
        _bin_masses(ndtr, edges - shift) for shift in (0.0, event.shift, -event.shift)
    )
    upper = q * above + (1 - q) * undrawn
    lower = q * below + (1 - q) * undrawn
    first = round(losses[0] / interval)
    masses, _ = _connect_dots(upper, lower, first, interval)
    beyond = sum(
        share * float(ndtr(np.array([edges[0] - shift, shift - edges[-1]])).sum())
        for share, shift in ((q, event.shift), (1 - q, 0.0))
    )
    found = LossMasses(first, masses, beyond)
    return found, found


def _connect_dots(
    upper: FloatArray, lower: FloatArray, first: int, interval: float
) -> tuple[FloatArray, FloatArray]:
    """Step 2: splits bin masses over the bins' ends, under ``upper`` and under ``lower``, such that
    at every point the ratio of the two is the exponential of the point's loss."""
    losses = np.arange(first, first + len(upper)) * interval
    with np.errstate(over="ignore", invalid="ignore"):
        to_right = np.clip((upper - np.exp(losses) * lower) / -math.expm1(-interval), 0.0, upper)
    to_right = np.where(losses < _LARGEST_EXPONENT, to_right, upper)  # rounding up is safe
    from_upper_to_lower = np.exp(np.minimum(-losses - interval, _LARGEST_EXPONENT))
    lower_to_right = np.minimum(to_right * from_upper_to_lower, lower)
    at_ends = [
        np.append(each - right, 0.0) + np.append(0.0, right)
        for each, right in ((upper, to_right), (lower, lower_to_right))
    ]
    return at_ends[0], at_ends[1]


@lru_cache(maxsize=4096)
def _ends(event: DpEvent, interval: float, direction: int) -> tuple[int, int, float]:
    """First and last loss, in intervals, and infinite mass. They are cached for longer than the
    masses."""
    loss = loss_masses(event, interval)[direction]
    return loss.first, loss.first + len(loss.masses) - 1, loss.infinite


class _Frame(NamedTuple):
    """The grid of a sum of losses, its direction, and the tilt of step 3."""

    interval: float
    direction: int  # 0: a member is removed, 1: added
    tilt: float


@lru_cache(maxsize=64)  # up to four megabytes each
def _present(
    event: DpEvent, interval: float, direction: int
) -> tuple[NDArray[np.int64], FloatArray]:
    """The losses of one release that have a mass, in intervals, and the logs of their masses. They
    serve many orders."""
    loss = loss_masses(event, interval)[direction]
    present = np.flatnonzero(loss.masses)
    return loss.first + present, np.log(loss.masses[present])


@lru_cache(maxsize=32768)
def _log_moment_of(event: DpEvent, interval: float, direction: int, order: float) -> float:
    """log E[exp(order * loss)] over the finite losses of one release."""
    steps, log_masses = _present(event, interval, direction)
    # In place: memory for each operation would take longer than the operation.
    exponents = (order * interval) * steps
    exponents += log_masses
    largest = exponents.max()
    exponents -= largest
    return float(largest + np.log(np.exp(exponents, out=exponents).sum()))


def _log_moment(counts: Counts, frame: _Frame, order: float) -> float:
    """log E[exp(order * summed loss)] over the finite losses. It does not depend on the frame's
    tilt."""
    return math.fsum(
        n * _log_moment_of(e, frame.interval, frame.direction, order) for e, n in counts.items()
    )


def _descend(bound: Callable[[float], float]) -> float:
    """The power of two at which a bound with a single minimum is smallest. The search goes upward
    only while that lowers the bound by 1 %."""
    place = 4
    best = bound(2.0**4)
    for step, gain in ((1, 0.01), (-1, 0.0)):
        while place + step in _POWERS and (
            further := bound(2.0 ** (place + step))
        ) < best - gain * abs(best):
            place = place + step
            best = further
    return 2.0**place


def _extent(counts: Counts, frame: _Frame, sign: int) -> int:
    """Step 4: the intervals that sign * (summed loss) exceeds with a tilted probability of at most
    _TAIL_MASS / 2."""
    level = math.log(2 / _TAIL_MASS) - _log_moment(counts, frame, frame.tilt)

    def bound(order: float) -> float:
        return (_log_moment(counts, frame, frame.tilt + sign * order) + level) / order

    certain = 0
    for event, count in counts.items():
        first, last, _ = _ends(event, frame.interval, frame.direction)
        certain += count * (last if sign > 0 else -first)
    return min(certain, math.ceil(bound(_descend(bound)) / frame.interval))


@lru_cache(maxsize=64)  # up to eight megabytes each
def _transform(event: DpEvent, frame: _Frame, length: int) -> tuple[FloatArray, FloatArray]:
    """Step 5, one release: log modulus and phase of the Fourier transform of its tilted loss, with
    loss 0 at index 0."""
    steps, log_masses = _present(event, frame.interval, frame.direction)
    log_moment = _log_moment_of(event, frame.interval, frame.direction, frame.tilt)
    tilted = np.exp(log_masses + frame.tilt * frame.interval * steps - log_moment)
    spectrum = fft.rfft(np.bincount(steps % length, weights=tilted, minlength=length))
    with np.errstate(divide="ignore"):
        return np.log(np.abs(spectrum)), np.angle(spectrum)


def _tilted_sum(counts: Counts, frame: _Frame, length: int) -> tuple[FloatArray, float]:
    """Step 5: the tilted masses of the summed loss, circular with loss 0 at index 0, and the bound
    of step 6 on their errors. Most frequencies are soon too small to be heard."""
    places = np.arange(length // 2 + 1)
    total = np.zeros((3, len(places)))
    for event, count in counts.items():
        log_modulus, phase = _transform(event, frame, length)
        # No other event raises a modulus, except by rounding.
        kept = total[0] + count * log_modulus[places] > _SMALLEST_EXPONENT - 1
        places = places[kept]
        with np.errstate(over="ignore"):
            relative = math.log2(length) * np.exp(-log_modulus[places]) + 10
        total = total[:, kept] + np.multiply(count, [log_modulus[places], phase[places], relative])
    heard = total[0] > _SMALLEST_EXPONENT
    log_modulus, phase, relative = total[:, heard]
    spectrum = np.zeros(length // 2 + 1, dtype=np.complex128)
    spectrum[places[heard]] = np.exp(log_modulus + 1j * phase)
    masses: FloatArray = np.maximum(fft.irfft(spectrum, length), 0.0)
    return masses, _error_norm(masses, np.abs(spectrum[places[heard]]), relative)


def _error_norm(masses: FloatArray, modulus: FloatArray, relative: FloatArray) -> float:
    """Step 6: bound on the Euclidean norm of the errors of `masses`, from the modulus of their
    transform and its relative errors."""
    levels = math.log2(len(masses))
    forward = math.sqrt(2 / len(masses)) * float(
        np.linalg.norm(modulus * (relative - _SMALLEST_EXPONENT))
    )
    return _UNIT * (forward + levels * float(np.linalg.norm(masses)))


def _weight(frame: _Frame, points: int) -> float:
    """Step 6: bound on the norm of exp(-tilt * x) * (1 - exp(-x)) over x = interval, 2 * interval,
    .., points * interval: 1 - exp(-x) is at most x, and at most 1."""
    step = frame.tilt * frame.interval
    if step == 0:
        return math.sqrt(points)
    once = -math.expm1(-2 * step)
    ratio = math.exp(-2 * step)
    return math.sqrt(min(points, ratio / once, frame.interval**2 * ratio * (1 + ratio) / once**3))


def _epsilon_in(counts: Counts, frame: _Frame, delta: float) -> float:
    """Step 7: epsilon in one direction. If rounding errors may hide much of delta, or epsilon lies
    below the window, a smaller tilt may find less."""
    low = -_extent(counts, frame, -1)
    high = _extent(counts, frame, 1)
    if high - low > _MAX_SUM_POINTS:
        # Only with a smaller tilt, after very many releases: the earlier epsilon stands.
        return math.inf
    # The next power of two, or three quarters of one: a growing count seldom changes the
    # transform's length.
    power = 1 << max(high - low, 3).bit_length()
    tilted, error = _tilted_sum(
        counts, frame, 3 * power // 4 if high - low < 3 * power // 4 else power
    )
    log_moment = _log_moment(counts, frame, frame.tilt)
    step = frame.tilt * frame.interval
    # At smaller losses undoing the tilt would overflow.
    if step:
        representable = math.ceil((log_moment - _LARGEST_EXPONENT) / step)
    else:
        representable = 0
    start = max(low, representable, 0)
    losses: FloatArray = frame.interval * np.arange(start, max(high, start) + 1, dtype=np.float64)
    untilt = np.exp(np.minimum(log_moment - frame.tilt * losses, _LARGEST_EXPONENT))
    masses = np.roll(tilted, -start)[: len(losses)] * untilt
    infinite = _TAIL_MASS * float(untilt[-1]) + _infinite_mass(counts, frame)
    hidden = error * _weight(frame, len(losses)) * untilt
    epsilon = _epsilon_from_masses(losses, masses, infinite, delta=delta - hidden)
    precise = (
        hidden[min(int(np.searchsorted(losses, epsilon)), len(losses) - 1)]
        < _LARGEST_HIDDEN * delta
    )
    if frame.tilt == 0 or (precise and (start == 0 or epsilon > losses[0])):
        return epsilon
    smaller = frame._replace(tilt=frame.tilt / 16 if frame.tilt > _SMALLEST_TILT else 0.0)
    return min(epsilon, _epsilon_in(counts, smaller, delta))


def _infinite_mass(counts: Counts, frame: _Frame) -> float:
    masses = ((n, _ends(event, frame.interval, frame.direction)[2]) for event, n in counts.items())
    return -math.expm1(math.fsum(n * math.log1p(-infinite) for n, infinite in masses))


def _epsilon_from_masses(
    losses: FloatArray, masses: FloatArray, infinite: float, *, delta: FloatArray
) -> float:
    """Step 7: the smallest epsilon, not below the first loss, for which infinite + sum over losses
    > epsilon of mass * (1 - exp(epsilon - loss)) is at most delta. `delta` grows with the loss;
    between two losses it is that of the lower."""
    if len(losses) > 1:
        ratio = math.exp(losses[0] - losses[1])
    else:
        ratio = 1.0
    downward = masses[::-1]
    at_least = infinite + np.cumsum(downward)[::-1]  # mass at or above each loss
    # sum of mass * exp(this loss - loss of the mass) over the same masses
    discounted = lfilter([1.0], [1.0, -ratio], downward)[::-1]
    # The difference is the delta at each loss.
    too_much = np.flatnonzero(at_least - discounted > delta)
    if len(too_much):
        index = int(too_much[-1]) + 1
    else:
        index = 0
    if index == len(losses):
        return math.inf
    excess = at_least[index] - delta[max(index - 1, 0)]
    if index == 0 or excess <= 0:
        return float(losses[index])
    return float(
        losses[index] + min(math.log(excess / discounted[index]), 0.0)
        if discounted[index]
        else losses[index]
    )


def _chernoff(counts: Counts, frame: _Frame, delta: float) -> float:
    """Step 8: epsilon in one direction by Chernoff's bound at one order; mostly a few percent above
    `_epsilon_in`."""
    order = 2 * frame.tilt
    left = delta - _infinite_mass(counts, frame)
    if left <= 0:
        return math.inf
    log_touching = order * math.log(order) - (1 + order) * math.log1p(order)
    return max(0.0, (_log_moment(counts, frame, order) + log_touching - math.log(left)) / order)


def _frames_that_fit(counts: Counts, interval: float, delta: float) -> list[_Frame]:
    """The frames of a grid; none if it is so fine that a window would have too many points."""
    for event in counts:
        first, last = grid_of(event, interval)
        if last - first >= _MAX_EVENT_POINTS:
            return []
    frames = _frames(counts, interval, delta)
    for frame in frames:
        if _extent(counts, frame, 1) + _extent(counts, frame, -1) >= _MAX_SUM_POINTS:
            return []
    return frames


def _frames(counts: Counts, interval: float, delta: float) -> list[_Frame]:
    """Step 3: a frame for each direction. Without sampling the two directions are mirror images,
    and one frame is enough.

    The tilt is half of the order at which Chernoff's bound is smallest: nearly as precise, and the
    window stays short if the loss of a single release can be large.
    """
    frames = []
    for direction in (
        (0, 1) if any(isinstance(event, PoissonSampledDpEvent) for event in counts) else (0,)
    ):
        frame = _Frame(interval, direction, 0.0)

        def bound(order: float, frame: _Frame = frame) -> float:
            return (_log_moment(counts, frame, order) - math.log(delta)) / order

        frames.append(frame._replace(tilt=_descend(bound) / 2))
    return frames


def composed_epsilon(counts: Counts, *, delta: float) -> float:
    """Epsilon at ``delta`` of all releases together: never below the true value, however small
    delta is.

    ``counts`` maps Gaussian and Laplace events, Poisson-sampled or not, to their number of
    releases. Adjacency: add or remove one member, or, if no event is sampled, the adjacency under
    which the sensitivities were taken. 0 if ``counts`` is empty; inf if delta is below the mass at
    infinite loss (8e-24 a release). If delta and a sampling probability are both tiny (1e-12 and
    1e-6), epsilon may be a few percent too large, at worst Chernoff's bound. Raises ValueError for
    an event of another kind.
    """
    if not counts:
        return 0.0
    delta *= 1 - _ROUNDING
    interval = FINEST_INTERVAL
    frames = _frames_that_fit(counts, interval, delta)
    while not frames:
        interval *= 2
        frames = _frames_that_fit(counts, interval, delta)
    epsilon = -math.inf
    for frame in frames:
        in_frame = min(_epsilon_in(counts, frame, delta), _chernoff(counts, frame, delta))
        epsilon = max(epsilon, in_frame)
    return epsilon
