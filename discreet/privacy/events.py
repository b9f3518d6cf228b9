"""The events that Discreet spends privacy on, and their JSON form for the durable ledger.

An event's ``noise_multiplier`` is the standard deviation (Gaussian) or the scale (Laplace) of the noise,
divided by the sensitivity of what it hides. What an event means, and under which adjacency, is said by the
function that makes it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
    SelfComposedDpEvent,
)


def poisson_round_event(sampling_probability: float, *, noise_multiplier: float) -> DpEvent:
    """The event of one round whose cohort takes each member with a probability, independently.

    Adjacency: add or remove one member. ``noise_multiplier`` is the noise's standard deviation over the clip
    norm C, the sensitivity of the sum. A probability of 1 is everybody, the plain Gaussian without
    amplification; noise 0 protects nobody and gives ``NonPrivateDpEvent``; a probability of 0 releases only
    noise.

    Raises:
        ValueError: a probability outside 0 .. 1, or noise that is negative or not finite.

    >>> poisson_round_event(1.0, noise_multiplier=1.5)
    GaussianDpEvent(noise_multiplier=1.5)
    """
    if not 0.0 <= sampling_probability <= 1.0:
        raise ValueError(f"sampling_probability must be in 0 .. 1, not {sampling_probability}")
    _require_noise(noise_multiplier)
    if sampling_probability == 0.0:
        return NoOpDpEvent()
    if noise_multiplier == 0.0:
        return NonPrivateDpEvent()
    gaussian = GaussianDpEvent(float(noise_multiplier))
    return (
        gaussian
        if sampling_probability == 1.0
        else PoissonSampledDpEvent(float(sampling_probability), gaussian)
    )


def fixed_size_round_event(cohort_size: int, *, population_size: int, noise_multiplier: float) -> DpEvent:
    """The event of one round whose cohort is a uniform subset of fixed size.

    Adjacency: replace one member. ``noise_multiplier`` is the noise's standard deviation over the clip norm
    C. Replacing a member moves the sum by up to 2C, which dp_accounting's bound (Wang, Balle and
    Kasiviswanathan 2019, Theorem 27) leaves to its caller: the event therefore holds ``noise_multiplier /
    2``, noise over sensitivity.

    Raises:
        ValueError: a cohort outside 0 .. population_size, an empty population, or noise that is negative or
            not finite.

    >>> fixed_size_round_event(10, population_size=100, noise_multiplier=2.0).event
    GaussianDpEvent(noise_multiplier=1.0)
    """
    if population_size < 1:
        raise ValueError(f"population_size must be at least 1, not {population_size}")
    if not 0 <= cohort_size <= population_size:
        raise ValueError(
            f"cohort_size must be in 0 .. {population_size} (population_size), not {cohort_size}"
        )
    _require_noise(noise_multiplier)
    if cohort_size == 0:
        return NoOpDpEvent()
    if noise_multiplier == 0.0:
        return NonPrivateDpEvent()
    return SampledWithoutReplacementDpEvent(
        population_size, cohort_size, GaussianDpEvent(noise_multiplier / 2)
    )


def event_to_json(event: DpEvent) -> str:
    """The canonical JSON text of an event: equal events have equal texts.

    Raises:
        ValueError: a kind of event that Discreet does not know, or a parameter out of range.

    >>> event_to_json(PoissonSampledDpEvent(0.5, GaussianDpEvent(1)))
    '{"event":{"kind":"gaussian","noise_multiplier":1.0},"kind":"poisson_sampled","sampling_probability":0.5}'
    """
    return json.dumps(_encode(event), sort_keys=True, separators=(",", ":"), allow_nan=False)


def event_from_json(text: str) -> DpEvent:
    """The event of a text made by ``event_to_json``.

    Raises:
        ValueError: a text that is not JSON, an unknown kind, missing or further fields, or a parameter out of
            range.

    >>> event_from_json('{"kind":"gaussian","noise_multiplier":1.0}')
    GaussianDpEvent(noise_multiplier=1.0)
    """
    return _decode(json.loads(text))


def _require_noise(noise_multiplier: float) -> None:
    if not 0.0 <= noise_multiplier < math.inf:
        raise ValueError(f"noise_multiplier must be finite and at least 0, not {noise_multiplier}")


def _real(name: str, value: Any, upper: float = math.inf) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0.0 <= value <= upper
        or math.isinf(value)
    ):
        raise ValueError(f"{name} of an event must be a finite number in 0 .. {upper}, not {value!r}")
    return float(value) + 0.0  # no negative zero


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} of an event must be a whole number of at least 0, not {value!r}")
    return value


def _encode(event: DpEvent) -> dict[str, Any]:
    match event:
        case GaussianDpEvent():
            return {"kind": "gaussian", "noise_multiplier": _real("noise_multiplier", event.noise_multiplier)}
        case LaplaceDpEvent():
            return {"kind": "laplace", "noise_multiplier": _real("noise_multiplier", event.noise_multiplier)}
        case PoissonSampledDpEvent():
            probability = _real("sampling_probability", event.sampling_probability, 1.0)
            return {
                "kind": "poisson_sampled",
                "sampling_probability": probability,
                "event": _encode(event.event),
            }
        case SampledWithoutReplacementDpEvent():
            return {
                "kind": "sampled_without_replacement",
                "source_dataset_size": _whole("source_dataset_size", event.source_dataset_size),
                "sample_size": _whole("sample_size", event.sample_size),
                "event": _encode(event.event),
            }
        case SelfComposedDpEvent():
            return {
                "kind": "self_composed",
                "count": _whole("count", event.count),
                "event": _encode(event.event),
            }
        case ComposedDpEvent():
            return {"kind": "composed", "events": [_encode(part) for part in event.events]}
        case NonPrivateDpEvent():
            return {"kind": "non_private"}
        case NoOpDpEvent():
            return {"kind": "no_op"}
    raise ValueError(f"an event of kind {type(event).__name__} is not known to Discreet")


_DECODERS: dict[str, tuple[frozenset[str], Callable[[dict[str, Any]], DpEvent]]] = {
    "gaussian": (
        frozenset({"noise_multiplier"}),
        lambda d: GaussianDpEvent(_real("noise_multiplier", d["noise_multiplier"])),
    ),
    "laplace": (
        frozenset({"noise_multiplier"}),
        lambda d: LaplaceDpEvent(_real("noise_multiplier", d["noise_multiplier"])),
    ),
    "poisson_sampled": (
        frozenset({"sampling_probability", "event"}),
        lambda d: PoissonSampledDpEvent(
            _real("sampling_probability", d["sampling_probability"], 1.0), _decode(d["event"])
        ),
    ),
    "sampled_without_replacement": (
        frozenset({"source_dataset_size", "sample_size", "event"}),
        lambda d: SampledWithoutReplacementDpEvent(
            _whole("source_dataset_size", d["source_dataset_size"]),
            _whole("sample_size", d["sample_size"]),
            _decode(d["event"]),
        ),
    ),
    "self_composed": (
        frozenset({"count", "event"}),
        lambda d: SelfComposedDpEvent(_decode(d["event"]), _whole("count", d["count"])),
    ),
    "composed": (
        frozenset({"events"}),
        lambda d: ComposedDpEvent([_decode(part) for part in _list(d["events"])]),
    ),
    "non_private": (frozenset(), lambda d: NonPrivateDpEvent()),
    "no_op": (frozenset(), lambda d: NoOpDpEvent()),
}


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"events of a composed event must be a list, not {value!r}")
    return value


def _decode(value: Any) -> DpEvent:
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _DECODERS:
        raise ValueError(f"an event must have one of the kinds {', '.join(_DECODERS)}, not {kind!r}")
    fields, build = _DECODERS[kind]
    if value.keys() != fields | {"kind"}:
        raise ValueError(
            f"an event of kind {kind} has the fields {sorted(fields)}, not {sorted(value.keys() - {'kind'})}"
        )
    return build(value)
