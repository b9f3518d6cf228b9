"""A cluster that is started here listens to this machine, answers its own processes, and keeps its files to itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")
import ray

from discreet.simulation.processes import below
from discreet.simulation.ray_cluster import connected
from tests.scripts.living import LOOPBACK, intrude, listening

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    # Ray leaves files of its processes to the collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with connected(None):
        ray.get(ray.remote(lambda: None).remote())  # a worker listens, too
        yield ray.get_runtime_context().gcs_address


def test_it_listens_on_the_loopback_interface_alone(address: str) -> None:
    found = listening([os.getpid(), *below(os.getpid())])
    assert int(address.rpartition(":")[2]) in {port for _, port in found}
    assert {host for host, _ in found} <= LOOPBACK


def test_a_stranger_who_knows_its_port_runs_no_code_in_it(address: str, tmp_path: Path) -> None:
    said = intrude(address, tmp_path / "run")
    assert "ray.exceptions.AuthenticationError" in said
    assert not (tmp_path / "run").exists()
