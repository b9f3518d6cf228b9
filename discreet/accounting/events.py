"""The privacy events of Discreet, their JSON form for the durable ledger, and the names of the
accountants and of noise that depends on rounds before.

An event's ``noise_multiplier`` is the standard deviation (Gaussian) or the scale (Laplace) of the
noise, over the sensitivity. The function that makes an event documents its meaning and its
adjacency.
"""

from __future__ import annotations

import json
import math
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dp_accounting import DpEvent

PLD = "pld"
RDP = "rdp"
ACCOUNTANTS = (PLD, RDP)
NONE = "none"
BSR = "bsr"
BISR = "bisr"
SQRT = "sqrt"
CORRELATIONS = (NONE, BSR, BISR, SQRT)
_ROUNDING = 1e-9  # relative: an epsilon of 8.000000001 meets a target of 8


def exceeds(epsilon: float, budget: float) -> bool:
    """True if an epsilon exceeds a budget by more than rounding, a relative 1e-9.

    >>> exceeds(8.000000001, 8), exceeds(8.0001, 8)
    (False, True)
    """
    return epsilon > budget * (1 + _ROUNDING)


def check_positive(name: str, value: float) -> None:
    """Raises ValueError unless a setting is finite and above 0."""
    if not 0.0 < value < math.inf:
        raise ValueError(f"{name} must be finite and above 0, not {value}")


def check_noise_multiplier(noise_multiplier: float) -> None:
    """Raises ValueError unless a noise multiplier is finite and at least 0."""
    if not 0.0 <= noise_multiplier < math.inf:
        raise ValueError(f"noise_multiplier must be finite and at least 0, not {noise_multiplier}")


def poisson_round_event(sampling_probability: float, *, noise_multiplier: float) -> DpEvent:
    """The event of one round whose cohort includes each member independently with a probability.

    Adjacency: add or remove one member. ``noise_multiplier`` is the noise's standard deviation over
    the clip norm C, the sensitivity of the sum. A probability of 1 gives the plain Gaussian event.
    Noise 0 gives ``NonPrivateDpEvent``; a probability of 0, which releases only noise, gives
    ``NoOpDpEvent``.

    >>> poisson_round_event(1.0, noise_multiplier=1.5)
    GaussianDpEvent(noise_multiplier=1.5)
    """
    from dp_accounting import GaussianDpEvent, NonPrivateDpEvent, NoOpDpEvent, PoissonSampledDpEvent

    if not 0.0 <= sampling_probability <= 1.0:
        raise ValueError(f"sampling_probability must be in 0 .. 1, not {sampling_probability}")
    check_noise_multiplier(noise_multiplier)
    if sampling_probability == 0.0:
        return NoOpDpEvent()
    if noise_multiplier == 0.0:
        return NonPrivateDpEvent()
    gaussian = GaussianDpEvent(float(noise_multiplier))
    if sampling_probability == 1.0:
        return gaussian
    return PoissonSampledDpEvent(float(sampling_probability), gaussian)


def fixed_size_round_event(
    cohort_size: int, *, population_size: int, noise_multiplier: float
) -> DpEvent:
    """The event of one round whose cohort is a uniform subset of fixed size.

    Adjacency: replace one member. ``noise_multiplier`` is the noise's standard deviation over the
    clip norm C. Replacing a member moves the sum by up to 2C, which dp_accounting's bound (Wang,
    Balle and Kasiviswanathan 2019, Theorem 27) leaves to its caller: the event holds
    ``noise_multiplier / 2``.

    >>> fixed_size_round_event(10, population_size=100, noise_multiplier=2.0).event
    GaussianDpEvent(noise_multiplier=1.0)
    """
    from dp_accounting import (
        GaussianDpEvent,
        NonPrivateDpEvent,
        NoOpDpEvent,
        SampledWithoutReplacementDpEvent,
    )

    if population_size < 1:
        raise ValueError(f"population_size must be at least 1, not {population_size}")
    if not 0 <= cohort_size <= population_size:
        raise ValueError(
            f"cohort_size must be in 0 .. {population_size} (population_size), not {cohort_size}"
        )
    check_noise_multiplier(noise_multiplier)
    if cohort_size == 0:
        return NoOpDpEvent()
    if noise_multiplier == 0.0:
        return NonPrivateDpEvent()
    return SampledWithoutReplacementDpEvent(
        population_size, cohort_size, GaussianDpEvent(noise_multiplier / 2)
    )


def joined_noise_multiplier(first: float, second: float) -> float:
    """The noise multiplier of the single Gaussian that costs as much as two Gaussian releases about
    the same members.

    In units of the noise's standard deviation, one member moves the first release by at most 1 /
    first and both together by at most sqrt(first^-2 + second^-2) in L2. This is exact for one
    sampled cohort too, which two separate events are not. 0 if one of them is 0.

    >>> round(joined_noise_multiplier(3.0, 4.0), 6)
    2.4
    """
    check_noise_multiplier(first)
    check_noise_multiplier(second)
    if first and second:
        return first * second / math.hypot(first, second)
    return 0.0


def event_to_json(event: DpEvent) -> str:
    """The canonical JSON text of an event: equal events have equal texts. Raises ValueError for an
    event that Discreet does not know.

    >>> from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    >>> event_to_json(PoissonSampledDpEvent(0.5, GaussianDpEvent(1)))
    '{"event":{"kind":"gaussian","noise_multiplier":1.0},"kind":"poisson_sampled","sampling_probability":0.5}'
    """
    return json.dumps(_encode(event), sort_keys=True, separators=(",", ":"), allow_nan=False)


# A ledger has the same few events again and again, and is read in every round.
@lru_cache(maxsize=4096)
def event_from_json(text: str) -> DpEvent:
    """The event of a text made by ``event_to_json``. Raises ValueError for any other text.

    >>> event_from_json('{"kind":"gaussian","noise_multiplier":1.0}')
    GaussianDpEvent(noise_multiplier=1.0)
    """
    try:
        return _decode(json.loads(text))
    except RecursionError:
        raise ValueError("the text of an event is nested too deeply") from None


def releases_in(event: DpEvent) -> float:
    """The number of noised releases in an event; for private selection, the mean over the number of
    trials."""
    from dp_accounting import ComposedDpEvent, SelfComposedDpEvent
    from dp_accounting.dp_event import RepeatAndSelectDpEvent

    match event:
        case ComposedDpEvent(events=parts):
            return math.fsum(map(releases_in, parts))
        case SelfComposedDpEvent(event=inner, count=count):
            return float(count) * releases_in(inner)
        case RepeatAndSelectDpEvent(event=inner, mean=mean):
            return float(mean) * releases_in(inner)
    return 1


def noise_in(event: DpEvent) -> float:
    """The noise multiplier of an event as one release: the noise over the sensitivity, without
    amplification by sampling.

    Composed parts count together: Gaussians as the single Gaussian that they amount to, others by
    the sum of their costs. 0 for an event without noise, infinity for one that releases nothing.
    Raises ValueError for an event of another kind.

    >>> from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
    >>> noise_in(PoissonSampledDpEvent(0.1, SelfComposedDpEvent(GaussianDpEvent(3.0), 9)))
    1.0
    """
    import dp_accounting as dp

    match event:
        case dp.GaussianDpEvent() | dp.LaplaceDpEvent():
            return float(event.noise_multiplier)
        case dp.PoissonSampledDpEvent() | dp.SampledWithoutReplacementDpEvent():
            return noise_in(event.event)
        case dp.SelfComposedDpEvent():
            return _noise_together([(event.event, event.count)])
        case dp.ComposedDpEvent():
            return _noise_together([(part, 1) for part in event.events])
        case dp.NonPrivateDpEvent():
            return 0.0
        case dp.NoOpDpEvent():
            return math.inf
    multiplier = getattr(event, "renyi_noise_multiplier", None)
    if multiplier is None:
        raise ValueError(f"an event of type {type(event).__name__} has no noise multiplier")
    return float(multiplier)


def _noise_together(parts: list[tuple[DpEvent, int]]) -> float:
    import dp_accounting as dp

    noises = [(noise_in(part), count) for part, count in parts if count]
    if any(noise == 0 for noise, _ in noises):
        return 0.0
    if all(isinstance(part, dp.GaussianDpEvent) for part, _ in parts):
        power = 2
    else:
        power = 1
    total = math.fsum(count / noise**power for noise, count in noises)
    return total ** (-1 / power) if total else math.inf


def _number(name: str, value: Any) -> int | float:
    """The checked value of a numeric field, in its canonical form."""
    whole = name in _WHOLE
    if name == "sampling_probability":
        largest = 1.0
    else:
        largest = sys.float_info.max
    kinds = int if whole else int | float
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= value <= largest:
        if whole:
            kind = "whole number of at least 0"
        else:
            kind = f"number in 0 .. {largest:g}"
        raise ValueError(f"{name} of an event must be a {kind}, not {value!r}")
    # Adding 0 turns a negative zero into 0.
    if whole:
        return value
    return float(value) + 0.0


def _encode(event: DpEvent) -> dict[str, Any]:
    known = _kinds_by_type().get(type(event))
    if known is None:
        raise ValueError(f"an event of type {type(event).__name__} is not known to Discreet")
    kind, names = known
    written: dict[str, Any] = {"kind": kind}
    for name in names:
        value = getattr(event, name)
        match name:
            case "event":
                written[name] = _encode(value)
            case "events" if isinstance(value, list | tuple):
                written[name] = [_encode(part) for part in value]
            case "shape" if value == math.inf:
                written[name] = "inf"
            case _:
                written[name] = _number(name, value)
    return written


def _decode(value: Any) -> DpEvent:
    if isinstance(value, dict):
        kind = value.get("kind")
    else:
        kind = None
    kinds = _kinds()
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"an event must have one of the kinds {', '.join(kinds)}, not {kind!r}")
    event_type, *names = kinds[kind]
    given = value.keys() - {"kind"}
    if given != set(names):
        raise ValueError(
            f"an event of kind {kind} has the fields {sorted(names)}, not {sorted(given)}"
        )
    return event_type(**{name: _decoded_field(name, value[name]) for name in names})


def _decoded_field(name: str, value: Any) -> Any:
    match name:
        case "event":
            return _decode(value)
        case "events" if isinstance(value, list | tuple):
            return [_decode(part) for part in value]
        case "shape" if value == "inf":
            return math.inf
    return _number(name, value)


_WHOLE = {
    "variance",
    "summands",
    "sensitivity_squared",
    "dimension",
    "source_dataset_size",
    "sample_size",
    "count",
}


@lru_cache(maxsize=1)
def _kinds() -> dict[str, tuple[Any, ...]]:
    """The type and the fields of each known event, by name. A function, since importing
    dp_accounting takes a second."""
    import dp_accounting as dp
    from dp_accounting import SampledWithoutReplacementDpEvent as FixedSize
    from dp_accounting.dp_event import RepeatAndSelectDpEvent

    from discreet.accounting.distributed_gaussian import (
        DistributedDiscreteGaussianDpEvent as Distributed,
    )

    return {
        "gaussian": (dp.GaussianDpEvent, "noise_multiplier"),
        "laplace": (dp.LaplaceDpEvent, "noise_multiplier"),
        "distributed_discrete_gaussian": (
            Distributed,
            "variance",
            "summands",
            "sensitivity_squared",
            "dimension",
        ),
        "poisson_sampled": (dp.PoissonSampledDpEvent, "sampling_probability", "event"),
        "sampled_without_replacement": (FixedSize, "source_dataset_size", "sample_size", "event"),
        "self_composed": (dp.SelfComposedDpEvent, "count", "event"),
        "composed": (dp.ComposedDpEvent, "events"),
        "repeat_and_select": (RepeatAndSelectDpEvent, "event", "mean", "shape"),
        "non_private": (dp.NonPrivateDpEvent,),
        "no_op": (dp.NoOpDpEvent,),
    }


@lru_cache(maxsize=1)
def _kinds_by_type() -> dict[type, tuple[str, list[str]]]:
    """The name and the fields of each known event, by type."""
    return {event_type: (kind, names) for kind, (event_type, *names) in _kinds().items()}
