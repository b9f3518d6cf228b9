from __future__ import annotations

import pytest
from dp_accounting import (
    ComposedDpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    PoissonSampledDpEvent,
    UnsupportedDpEvent,
)

from discreet.privacy.privacy_ledger import PrivacyLedger

ROUND = PoissonSampledDpEvent(0.1, GaussianDpEvent(3.0))


def test_an_empty_ledger_has_spent_nothing() -> None:
    assert PrivacyLedger().epsilon(1e-6) == 0.0
    assert PrivacyLedger().num_releases == 0


def test_recording_leaves_the_ledger_before_it_alone() -> None:
    before = PrivacyLedger().record(ROUND)
    before.record(ROUND)
    assert before.entries == ((ROUND, 1),)


def test_equal_events_are_merged_in_order_of_first_appearance() -> None:
    ledger = PrivacyLedger().record(ROUND).record(LaplaceDpEvent(2.0), 3).record(ROUND, 4)
    assert ledger.entries == ((ROUND, 5), (LaplaceDpEvent(2.0), 3))
    assert ledger.num_releases == 8


def test_events_that_cannot_be_hashed_are_merged_too() -> None:
    event = ComposedDpEvent([GaussianDpEvent(1.0), GaussianDpEvent(2.0)])
    assert PrivacyLedger().record(event).record(ComposedDpEvent(list(event.events))).entries == ((event, 2),)


def test_a_count_of_zero_leaves_the_ledger_as_it_is() -> None:
    assert PrivacyLedger().record(ROUND, 0) == PrivacyLedger()


@pytest.mark.parametrize("count", [-1, 1.0, True, float("nan")])
def test_a_count_that_is_not_a_whole_number_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="count must be a whole number of at least 0"):
        PrivacyLedger().record(ROUND, count)


def test_an_event_that_no_accountant_knows_is_refused_when_it_is_recorded() -> None:
    with pytest.raises(ValueError, match="UnsupportedDpEvent is not known"):
        PrivacyLedger().record(UnsupportedDpEvent())
