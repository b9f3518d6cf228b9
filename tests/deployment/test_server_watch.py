"""What a benchmark sees of a federation's server."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks.load_speed import rows
from benchmarks.server_watch import Look, Watch, peak_memory, processor_seconds
from discreet.deployment.local_federation import Federation

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    looks = [Look(at, {"gate": 0.0, "link": used, "app": 1.0}, size, 0) for at, used, size in ((0, 1, 5), (10, 3, 9))]
    return Watch(Federation(tmp_path, tmp_path), looks=looks)


def test_between_two_looks_processor_seconds_grow_evenly(watch: Watch) -> None:
    assert watch.processor_between(2.5, 5) == {"gate": 0.0, "link": 0.5, "app": 0.0}


def test_after_the_last_look_nothing_is_added(watch: Watch) -> None:
    assert watch.processor_between(0, 99)["link"] == 2.0


def test_the_databases_size_is_that_of_the_look_before(watch: Watch) -> None:
    assert [watch.database_at(moment) for moment in (-1, 9, 10)] == [0, 5, 9]


def test_a_process_is_read_as_the_system_counts_it() -> None:
    assert peak_memory(os.getpid()) > 2**23
    times = os.times()
    assert processor_seconds(os.getpid()) == pytest.approx(times.user + times.system, abs=0.5)


@pytest.mark.slow
def test_light_nodes_cost_the_server_what_they_send() -> None:
    found = rows((2,), (1000, 300_000), rounds=1)
    assert [(row["nodes"], row["parameters"], row["replies"]) for row in found] == [(2, 1000, 2), (2, 300_000, 2)]
    assert found[1]["bytes"] - found[0]["bytes"] == pytest.approx(2 * 2 * 4 * 299_000, rel=0.02)
    assert all(row[f"{part}_mib"] > 20 and row["link_seconds"] > 0 for row in found for part in ("gate", "link", "app"))
