"""Events to epsilon: the privacy cost of a set of releases about the same data.

The adjacency of an epsilon follows from the events:

- a Poisson-sampled event: add or remove one member, if the sampling probability does not depend on
  the members; zero-out (a member contributes nothing, and is still counted) if it does;
- an event sampled without replacement: replace one member;
- a Gaussian or Laplace event that is not sampled: the adjacency under which the caller took its
  ``noise_multiplier`` (noise over sensitivity). Beside Poisson-sampled events it means add or
  remove;
- a sum of several clients' discrete Gaussians (``DistributedDiscreteGaussianDpEvent``): zero out
  one member. Gaussian events beside it then mean zero-out too, which moves a sum as adding or
  removing does.

Private selection (``RepeatAndSelectDpEvent``, see ``discreet.privacy.selection``) has the adjacency
of its trials.

Releases may be chosen adaptively: each may depend on earlier releases. Events of different
adjacency never share an epsilon.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache

import dp_accounting as dp
import numpy as np
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant, compute_epsilon
from numpy.typing import NDArray

from discreet.accounting.distributed_gaussian import DistributedDiscreteGaussianDpEvent
from discreet.accounting.events import ACCOUNTANTS, PLD
from discreet.accounting.loss_distribution import composed_epsilon

Entries = Sequence[tuple[dp.DpEvent, int]]
Counts = Mapping[dp.DpEvent, int]

RDP_ORDERS = tuple(
    [1 + x / 10 for x in range(1, 100)] + list(range(11, 64)) + [128, 256, 512, 1024]
)
PRIMIHUB_ORDERS = tuple([1 + x / 10 for x in range(1, 100)] + list(range(12, 64)))
_SMALL_DELTA = 1e-18
# Beyond these values floating point fails. Noise is rounded down and probabilities up, which rounds
# epsilon up.
_NO_NOISE = 1e-6
_MUCH_NOISE = 1e100
_NEARLY_ZERO = 1e-30
_NEARLY_ONE = 1 - 1e-12


def epsilon_spent(entries: Entries, *, delta: float, accountant: str = PLD) -> float:
    """The epsilon at ``delta`` of all releases together, under the adjacency of the events (see the
    module).

    ``entries`` are events with the number of releases of each, in any order. The result is 0 if
    nothing was released, and inf if a release had no noise. The accountant ``pld`` (privacy loss
    distributions) is the tighter one; it knows Gaussian and Laplace events, Poisson-sampled or not.
    Below a delta of 1e-18, where the tails that it counts as infinite loss matter, the result is
    the smaller of both bounds. ``rdp`` (Renyi, with the conversion of Canonne, Kamath and Steinke
    2020, Proposition 12) does not know sampled Laplace events. It also knows Gaussian events
    sampled without replacement, private selection, and the discrete Gaussians of secure
    aggregation. Raises ValueError: this accountant has no epsilon for an event at this delta, or
    the events have different adjacency.

    >>> event = dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(3.0))
    >>> round(epsilon_spent([(event, 512)], delta=1e-6), 4)
    3.7697
    """
    if accountant not in ACCOUNTANTS:
        raise ValueError(f"accountant must be one of {', '.join(ACCOUNTANTS)}, not {accountant!r}")
    _require_delta(delta)
    counts = merged(entries)
    if dp.NonPrivateDpEvent() in counts:
        return math.inf
    if accountant != PLD:
        return rdp_epsilon(entries, delta=delta)
    found = _pld(counts, delta)
    if delta >= _SMALL_DELTA or not all(_has_renyi(event) for event in counts):
        return found
    return min(found, rdp_epsilon(entries, delta=delta))


def pure_epsilon(entries: Entries) -> float:
    """The epsilon at delta 0, where epsilons add up: 1 / noise_multiplier for a Laplace event that
    is not sampled, and inf for any other release.

    >>> pure_epsilon([(dp.LaplaceDpEvent(2.0), 3)])
    1.5
    """
    return math.fsum(
        count / event.noise_multiplier if isinstance(event, dp.LaplaceDpEvent) else math.inf
        for event, count in merged(entries).items()
    )


def rdp_epsilon(
    entries: Entries, *, delta: float, orders: Sequence[float] = RDP_ORDERS, classic: bool = False
) -> float:
    """Epsilon by Renyi differential privacy at chosen orders, otherwise as
    ``epsilon_spent(accountant="rdp")``.

    With ``PRIMIHUB_ORDERS`` it is the number that PrimiHub reports. ``classic`` takes the
    conversion of older published numbers, the smallest rdp(order) + log(1 / delta) / (order - 1)
    (Mironov 2017, Proposition 3), which is larger. With ``classic`` and the orders 2 to 33 this is
    the moments accountant of Abadi et al. 2016.
    """
    _require_delta(delta)
    if not orders or min(orders) <= 1:
        raise ValueError(f"orders must be above 1, and at least one, not {tuple(orders)}")
    curve = rdp_curve(entries, tuple(orders))
    if not curve.any():
        return 0.0
    if classic:
        return float(np.min(curve - math.log(delta) / (np.array(orders) - 1)))
    return float(compute_epsilon(orders, curve, delta)[0])


def rdp_curve(entries: Entries, orders: tuple[float, ...] = RDP_ORDERS) -> NDArray[np.float64]:
    """The Renyi divergence of all releases together at each order; infinite without noise, or at an
    order that dp_accounting skips."""
    total = np.zeros(len(orders))
    for event, count in merged(entries).items():
        total += count * _rdp_of(event, orders)
    return total


def _require_delta(delta: float) -> None:
    if not 0.0 < delta < 1.0:
        if delta == 0:
            hint = "; pure_epsilon gives the epsilon at delta 0"
        else:
            hint = ""
        raise ValueError(f"delta must be between 0 and 1, both excluded, not {delta}{hint}")


def merged(entries: Entries) -> dict[dp.DpEvent, int]:
    """The events in their simplest form: equal ones are counted together, free ones left out."""
    counts: dict[dp.DpEvent, int] = {}
    for event, count in entries:
        for part, times in _times(_parts(event), count):
            counts[part] = counts.get(part, 0) + times
    counts = {event: count for event, count in counts.items() if count}
    noisy = counts.keys() - {dp.NonPrivateDpEvent()}
    if len({_replaces(event) for event in noisy}) > 1:
        raise ValueError(
            "events sampled without replacement (adjacency: replace one) and others (add or "
            "remove one) do not share an epsilon"
        )
    return counts


def _replaces(event: dp.DpEvent) -> bool:
    if isinstance(event, RepeatAndSelectDpEvent):
        return any(_replaces(part) for part in merged([(event.event, 1)]))
    return isinstance(event, dp.SampledWithoutReplacementDpEvent)


def _parts(event: dp.DpEvent) -> list[tuple[dp.DpEvent, int]]:
    """The parts of an event, each with its count: Gaussian and Laplace events, sums of discrete
    Gaussians, private selections and ``NonPrivateDpEvent``."""
    match event:
        case dp.NoOpDpEvent():
            return []
        case dp.NonPrivateDpEvent() | DistributedDiscreteGaussianDpEvent():
            return [(event, 1)]
        case dp.SelfComposedDpEvent():
            return _times(_parts(event.event), event.count)
        case dp.ComposedDpEvent():
            return [part for inner in event.events for part in _parts(inner)]
        case dp.GaussianDpEvent() | dp.LaplaceDpEvent():
            return [(_noise(event), 1)]
        case dp.PoissonSampledDpEvent(event=dp.GaussianDpEvent() | dp.LaplaceDpEvent()):
            return _poisson_parts(event)
        case dp.SampledWithoutReplacementDpEvent(event=dp.GaussianDpEvent()):
            return _fixed_size_parts(event)
        case RepeatAndSelectDpEvent():
            return _selection_parts(event)
    raise ValueError(
        f"no accountant knows the event {event}; compose sampled events into one Gaussian first"
    )


def _poisson_parts(event: dp.PoissonSampledDpEvent) -> list[tuple[dp.DpEvent, int]]:
    probability = float(event.sampling_probability)
    noise = _noise(event.event)
    if not 0.0 <= probability <= 1.0:
        raise ValueError(f"sampling_probability of an event must be in 0 .. 1, not {probability}")
    if not probability:
        return []
    if probability <= _NEARLY_ONE and not isinstance(noise, dp.NonPrivateDpEvent):
        noise = dp.PoissonSampledDpEvent(max(probability, _NEARLY_ZERO), noise)
    return [(noise, 1)]


def _fixed_size_parts(
    event: dp.SampledWithoutReplacementDpEvent,
) -> list[tuple[dp.DpEvent, int]]:
    population = event.source_dataset_size
    size = event.sample_size
    noise = _noise(event.event)
    if not 0 <= size <= population or population < 1:
        raise ValueError(
            f"a sample of {size} out of {population} without replacement does not exist"
        )
    if not size:
        return []
    if not isinstance(noise, dp.NonPrivateDpEvent):
        noise = dp.SampledWithoutReplacementDpEvent(population, size, noise)
    return [(noise, 1)]


def _selection_parts(event: RepeatAndSelectDpEvent) -> list[tuple[dp.DpEvent, int]]:
    inner = merged([(event.event, 1)])
    if not inner:
        return []
    if dp.NonPrivateDpEvent() in inner:
        return [(dp.NonPrivateDpEvent(), 1)]
    trial = dp.ComposedDpEvent(
        tuple(dp.SelfComposedDpEvent(_in_renyi(part), n) for part, n in inner.items())
    )
    return [(RepeatAndSelectDpEvent(trial, event.mean, event.shape), 1)]


def _times(parts: list[tuple[dp.DpEvent, int]], count: int) -> list[tuple[dp.DpEvent, int]]:
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ValueError(f"count must be a whole number of at least 0, not {count!r}")
    return [(part, count * times) for part, times in parts]


def _noise(event: dp.DpEvent) -> dp.DpEvent:
    noise = float(event.noise_multiplier)
    if not 0.0 <= noise < math.inf:
        raise ValueError(f"noise_multiplier of an event must be finite and at least 0, not {noise}")
    if noise >= _NO_NOISE:
        return type(event)(min(noise, _MUCH_NOISE))
    return dp.NonPrivateDpEvent()


_RDP_ALONE: dict[type[dp.DpEvent], str] = {
    dp.SampledWithoutReplacementDpEvent: "sampling of a fixed size without replacement",
    RepeatAndSelectDpEvent: "the choice among trials",
    DistributedDiscreteGaussianDpEvent: "the discrete Gaussians of secure aggregation",
}


def _pld(counts: Counts, delta: float) -> float:
    for kind, words in _RDP_ALONE.items():
        if any(isinstance(event, kind) for event in counts):
            raise ValueError(
                f"accountant 'pld' does not know {words}: choose 'rdp' (privacy.accountant=rdp)"
            )
    precision = math.fsum(
        n / e.noise_multiplier**2 for e, n in counts.items() if isinstance(e, dp.GaussianDpEvent)
    )
    others = {event: n for event, n in counts.items() if not isinstance(event, dp.GaussianDpEvent)}
    if not precision:
        return composed_epsilon(others, delta=delta)
    # Gaussian releases together are exactly one Gaussian release.
    noise = precision**-0.5
    if not others:
        return _gaussian(noise, delta)
    return composed_epsilon({**others, dp.GaussianDpEvent(noise): 1}, delta=delta)


def _has_renyi(event: dp.DpEvent) -> bool:
    """True for events whose Renyi divergence is known too: all that have a PLD, except sampled
    Laplace events."""
    return not (
        isinstance(event, dp.PoissonSampledDpEvent) and isinstance(event.event, dp.LaplaceDpEvent)
    )


def _gaussian(noise: float, delta: float) -> float:
    """The epsilon of one Gaussian release, with the tolerance of its search added."""
    # Imported here: a loop whose steps are sampled does without it.
    from discreet.accounting.unsampled_gaussian import TOLERANCE, gaussian_epsilon

    epsilon = gaussian_epsilon(noise, delta=delta)
    if epsilon:
        return epsilon + TOLERANCE * max(1.0, epsilon)
    return 0.0


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences absl's warnings on orders that dp_accounting skips, which only makes the bound
    looser. A root logger without a handler would get one from absl that prints the lines of every
    library."""
    logger = logging.getLogger("absl")
    root = logging.getLogger()
    placeholder = logging.NullHandler()
    level = logger.level
    logger.setLevel(logging.ERROR)
    root.addHandler(placeholder)
    try:
        yield
    finally:
        root.removeHandler(placeholder)
        logger.setLevel(level)


@lru_cache(maxsize=1024)
def _rdp_of(event: dp.DpEvent, orders: tuple[float, ...]) -> NDArray[np.float64]:
    """The Renyi divergence of one release at each order; infinite without noise, or at an order
    that rounding spoils."""
    every = np.full(len(orders), math.inf)
    if isinstance(event, dp.NonPrivateDpEvent):
        return every
    if isinstance(event, RepeatAndSelectDpEvent):
        # An order that is skipped for the trials would spoil the others.
        usable = np.isfinite(rdp_curve([(event.event, 1)], orders))
        every[usable] = _composed_rdp(event, tuple(np.array(orders)[usable].tolist()))
        return every
    return _composed_rdp(_in_renyi(event), orders)


def _in_renyi(event: dp.DpEvent) -> dp.DpEvent:
    """An event whose Renyi divergence at every order is at least that of `event`, and known to
    dp_accounting."""
    if isinstance(event, DistributedDiscreteGaussianDpEvent):
        return dp.GaussianDpEvent(event.renyi_noise_multiplier)
    return event


def _composed_rdp(event: dp.DpEvent, orders: tuple[float, ...]) -> NDArray[np.float64]:
    if _replaces(event):
        relation = dp.NeighboringRelation.REPLACE_ONE
    else:
        relation = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant = RdpAccountant(orders, relation)
    if not accountant.supports(event):
        raise ValueError(f"accountant 'rdp' does not know the event {event}: choose 'pld'")
    with _quiet():
        rdp: NDArray[np.float64] = accountant.compose(event).rdp
    return np.where(rdp >= 0, rdp, math.inf)
