"""A project that `discreet new` made, on real nodes: its bundle holds no Discreet; nodes and server take their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from discreet.deployment.local_federation import demonstration, federation_of
from discreet.federated.run_folder import state_of
from tests.command import new

pytestmark = pytest.mark.slow

# The nodes' demonstration data, and noise at each node for its own examples.
WORDS = (
    *("rounds=2", "data.name=digits", "data.path=null", "data.num_clients=2", "data.partition=iid"),
    *("model.name=logistic_regression", "training.batch_size=36", "server.momentum=0"),
    *("sampling.kind=everyone", "sampling.probability=1", "sampling.min_nodes=2"),
    *("privacy.user.enabled=false", "privacy.user.target_epsilon=null"),
    *("privacy.example.enabled=true", "privacy.example.noise_multiplier=1.5"),
)


def test_a_project_trains_on_real_nodes(tmp_path: Path) -> None:
    assert new([str(tmp_path / "trial")]) == 0
    with federation_of(demonstration(2), tmp_path / "federation") as federation:
        run = federation.run("run", *WORDS, app=tmp_path / "trial")
        federation.finish(run)
    rows = run.read_metrics()
    assert state_of(run) == "finished"
    assert [(row["round"], row["replies"]) for row in rows] == [(1, 2), (2, 2)]
    assert 0 < (rows[-1]["epsilon_example"] or 0) < 10
