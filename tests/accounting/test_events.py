from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
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
    UnsupportedDpEvent,
)
from hypothesis import given
from hypothesis import strategies as st

from discreet.accounting.distributed_gaussian import DistributedDiscreteGaussianDpEvent
from discreet.accounting.events import (
    event_from_json,
    event_to_json,
    fixed_size_round_event,
    poisson_round_event,
)
from discreet.accounting.privacy_ledger import PrivacyLedger

noises = st.floats(min_value=0, max_value=1e300)
plain_events = st.one_of(
    noises.map(GaussianDpEvent),
    noises.map(LaplaceDpEvent),
    st.sampled_from([NoOpDpEvent(), NonPrivateDpEvent()]),
    st.builds(DistributedDiscreteGaussianDpEvent, *4 * [st.integers(1, 10_000)]),
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
    text = event_to_json(event)
    assert event_from_json(text) == event
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))


@pytest.mark.parametrize(
    "event",
    [
        UnsupportedDpEvent(),
        GaussianDpEvent(float("nan")),
        PoissonSampledDpEvent(1.5, GaussianDpEvent(1.0)),
        SelfComposedDpEvent(GaussianDpEvent(1.0), 1.5),
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
        '{"kind":"other"}',
        '{"kind":"gaussian","noise_multiplier":NaN}',
        '{"kind":"gaussian","noise_multiplier":"1"}',
        '{"kind":"gaussian","noise_multiplier":1,"more":1}',
        '{"kind":"gaussian","noise_multiplier":1' + 400 * "0" + "}",
        '{"kind":"self_composed","count":1.0,"event":{"kind":"no_op"}}',
        100_000 * "[",
    ],
)
def test_a_text_that_is_no_event_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (json's own message, or ours)
        event_from_json(text)


def test_the_event_of_a_round_follows_from_noise_and_cohort() -> None:
    assert poisson_round_event(0.05, noise_multiplier=1.2) == PoissonSampledDpEvent(
        0.05, GaussianDpEvent(1.2)
    )
    assert poisson_round_event(0.05, noise_multiplier=0.0) == NonPrivateDpEvent()
    assert poisson_round_event(0.0, noise_multiplier=1.0) == NoOpDpEvent()
    assert (
        fixed_size_round_event(5, population_size=10, noise_multiplier=0.0) == NonPrivateDpEvent()
    )
    assert fixed_size_round_event(0, population_size=10, noise_multiplier=1.0) == NoOpDpEvent()


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        *((poisson_round_event, (q, 1.0), r"must be in 0 \.\. 1") for q in (-0.1, 1.1, math.nan)),
        *(
            (poisson_round_event, (0.5, noise), "must be finite and at least 0")
            for noise in (-0.1, math.nan)
        ),
        *(
            (fixed_size_round_event, (*sizes, 1.0), "population_size")
            for sizes in ((11, 10), (-1, 10), (0, 0))
        ),
    ],
)
def test_a_round_out_of_range_is_refused(
    make: Callable[..., DpEvent], given: tuple[float, ...], message: str
) -> None:
    first, *population, noise = given
    size = {"population_size": population[0]} if population else {}
    with pytest.raises(ValueError, match=message):
        make(first, **size, noise_multiplier=noise)


ROUND = PoissonSampledDpEvent(0.1, GaussianDpEvent(3.0))


def test_equal_events_are_merged_in_order_of_first_appearance() -> None:
    event = ComposedDpEvent([GaussianDpEvent(1.0), GaussianDpEvent(2.0)])  # has no hash
    before = PrivacyLedger().record(ROUND).record(LaplaceDpEvent(2.0), 3).record(ROUND, 0)
    after = before.record(ROUND, 4).record(event).record(ComposedDpEvent(list(event.events)))
    assert after.entries == ((ROUND, 5), (LaplaceDpEvent(2.0), 3), (event, 2))
    assert before.entries == ((ROUND, 1), (LaplaceDpEvent(2.0), 3))
    assert before.num_releases == 4


@pytest.mark.parametrize(
    ("event", "count", "message"),
    [(ROUND, -1, "count must"), (ROUND, 1.0, "count must"), (UnsupportedDpEvent(), 1, "not known")],
)
def test_what_can_not_be_accounted_is_not_recorded(
    event: DpEvent, count: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PrivacyLedger().record(event, count)


def test_a_ledger_takes_a_list_of_composed_events_as_dp_accounting_writes_it() -> None:
    parts = [GaussianDpEvent(2.0), GaussianDpEvent(2.0)]
    ledger = PrivacyLedger(((ComposedDpEvent(parts), 1),))
    alone = PrivacyLedger(((GaussianDpEvent(2.0), 2),))
    assert ledger.epsilon(1e-5) == pytest.approx(alone.epsilon(1e-5), rel=1e-9)
