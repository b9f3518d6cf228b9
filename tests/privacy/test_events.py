from __future__ import annotations

import json

import pytest
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    RandomizedResponseDpEvent,
    SampledWithoutReplacementDpEvent,
    SelfComposedDpEvent,
    UnsupportedDpEvent,
)
from hypothesis import given
from hypothesis import strategies as st

from discreet.privacy.events import (
    event_from_json,
    event_to_json,
    fixed_size_round_event,
    poisson_round_event,
)

noises = st.floats(min_value=0, max_value=1e300)
plain_events = st.one_of(
    noises.map(GaussianDpEvent),
    noises.map(LaplaceDpEvent),
    st.just(NoOpDpEvent()),
    st.just(NonPrivateDpEvent()),
)
whole = st.integers(min_value=0, max_value=10**12)
events = st.recursive(
    plain_events,
    lambda inner: st.one_of(
        st.builds(PoissonSampledDpEvent, st.floats(0, 1), inner),
        st.builds(SampledWithoutReplacementDpEvent, whole, whole, inner),
        st.builds(SelfComposedDpEvent, inner, whole),
        st.builds(ComposedDpEvent, st.lists(inner, max_size=3)),
    ),
    max_leaves=6,
)


@given(events)
def test_an_event_survives_its_json_text(event: DpEvent) -> None:
    assert event_from_json(event_to_json(event)) == event


@given(events)
def test_the_text_of_an_event_is_canonical(event: DpEvent) -> None:
    text = event_to_json(event)
    assert text == event_to_json(event_from_json(text))
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))


def test_equal_events_have_equal_texts() -> None:
    assert event_to_json(GaussianDpEvent(1)) == event_to_json(GaussianDpEvent(1.0))
    assert event_to_json(GaussianDpEvent(0.0)) == event_to_json(GaussianDpEvent(-0.0))
    assert event_to_json(ComposedDpEvent([NoOpDpEvent()])) == event_to_json(ComposedDpEvent((NoOpDpEvent(),)))


@pytest.mark.parametrize(
    "event",
    [
        UnsupportedDpEvent(),
        RandomizedResponseDpEvent(0.5, 2),
        PoissonSampledDpEvent(0.5, UnsupportedDpEvent()),
        GaussianDpEvent(float("nan")),
        GaussianDpEvent(float("inf")),
        GaussianDpEvent(-1.0),
        GaussianDpEvent("1"),
        PoissonSampledDpEvent(1.5, GaussianDpEvent(1.0)),
        SelfComposedDpEvent(GaussianDpEvent(1.0), 1.5),
        SelfComposedDpEvent(GaussianDpEvent(1.0), True),
        SampledWithoutReplacementDpEvent(10, -1, GaussianDpEvent(1.0)),
    ],
)
def test_what_discreet_does_not_know_has_no_text(event: DpEvent) -> None:
    with pytest.raises(ValueError, match="event"):
        event_to_json(event)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{}",
        '{"kind":"other"}',
        '{"kind":["gaussian"]}',
        '{"kind":"gaussian"}',
        '{"kind":"gaussian","noise_multiplier":NaN}',
        '{"kind":"gaussian","noise_multiplier":Infinity}',
        '{"kind":"gaussian","noise_multiplier":"1"}',
        '{"kind":"gaussian","noise_multiplier":true}',
        '{"kind":"gaussian","noise_multiplier":1,"more":1}',
        '{"kind":"gaussian","noise_multiplier":1' + 400 * "0" + "}",
        '{"kind":"composed","events":{}}',
        '{"kind":"self_composed","count":1.0,"event":{"kind":"no_op"}}',
        100_000 * "[",
    ],
)
def test_a_text_that_is_no_event_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (json's own message, or ours)
        event_from_json(text)


def test_a_poisson_round_is_a_sampled_gaussian() -> None:
    expected = PoissonSampledDpEvent(0.05, GaussianDpEvent(1.2))
    assert poisson_round_event(0.05, noise_multiplier=1.2) == expected


def test_a_round_without_noise_is_not_private() -> None:
    assert poisson_round_event(0.05, noise_multiplier=0.0) == NonPrivateDpEvent()
    assert fixed_size_round_event(5, population_size=10, noise_multiplier=0.0) == NonPrivateDpEvent()


def test_a_round_without_members_costs_nothing() -> None:
    assert poisson_round_event(0.0, noise_multiplier=1.0) == NoOpDpEvent()
    assert fixed_size_round_event(0, population_size=10, noise_multiplier=1.0) == NoOpDpEvent()


def test_a_fixed_size_round_counts_the_sensitivity_of_replacing() -> None:
    expected = SampledWithoutReplacementDpEvent(3383, 120, GaussianDpEvent(0.6))
    assert fixed_size_round_event(120, population_size=3383, noise_multiplier=1.2) == expected


@pytest.mark.parametrize("probability", [-0.1, 1.1, float("nan")])
def test_a_probability_out_of_range_is_refused(probability: float) -> None:
    with pytest.raises(ValueError, match=r"sampling_probability must be in 0 \.\. 1"):
        poisson_round_event(probability, noise_multiplier=1.0)


@pytest.mark.parametrize("noise", [-0.1, float("inf"), float("nan")])
def test_noise_out_of_range_is_refused(noise: float) -> None:
    with pytest.raises(ValueError, match="noise_multiplier must be finite and at least 0"):
        poisson_round_event(0.5, noise_multiplier=noise)
    with pytest.raises(ValueError, match="noise_multiplier must be finite and at least 0"):
        fixed_size_round_event(5, population_size=10, noise_multiplier=noise)


@pytest.mark.parametrize(("cohort", "population"), [(11, 10), (-1, 10), (0, 0)])
def test_a_cohort_that_does_not_fit_its_population_is_refused(cohort: int, population: int) -> None:
    with pytest.raises(ValueError, match="population_size"):
        fixed_size_round_event(cohort, population_size=population, noise_multiplier=1.0)
