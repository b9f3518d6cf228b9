"""A SuperLink's memory does not grow with its nodes; with Flower's own it does."""

from __future__ import annotations

import pytest

from benchmarks.load_speed import rows_of
from discreet.deployment.flower_fixes.commands import SWITCH

NODES, PARAMETERS = 10, 5_000_000
MOST_MEBIBYTES = 450  # 301 to 370 were measured from 4 to 40 nodes, 724 with ten of them and Flower's own


@pytest.mark.slow
@pytest.mark.parametrize(("off", "small"), [("", True), ("-content_garbage -database", False)])
def test_a_superlink_holds_little_of_what_ten_nodes_send(
    off: str, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, off)
    (row,) = rows_of(NODES, (PARAMETERS,), rounds=1)
    assert row["replies"] == NODES
    assert (row["link_mib"] < MOST_MEBIBYTES) is small
