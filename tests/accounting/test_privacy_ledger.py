from __future__ import annotations

import pytest
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    PoissonSampledDpEvent,
    UnsupportedDpEvent,
)

from discreet.accounting.privacy_ledger import PrivacyLedger

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
def test_what_can_not_be_accounted_is_not_recorded(event: DpEvent, count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrivacyLedger().record(event, count)
