"""Real nodes of several kinds: a project of its own, private evaluation, sequences of several lengths."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent

from discreet.deployment.local_federation import demonstration, federation_of, main
from discreet.ledger.durable_ledger import DurableLedger
from discreet.server.run_folder import RunFolder, state_of
from tests.command import new
from tests.sequences import folder, rows

pytestmark = pytest.mark.slow

PER_EXAMPLE = (
    *("privacy.user.enabled=false", "privacy.user.target_epsilon=null", "sampling.kind=everyone"),
    *("privacy.example.enabled=true", "privacy.example.noise_multiplier=2"),
)
LENGTHS = (2, 4, 6)


def test_a_project_whose_bundle_holds_no_discreet_trains_on_real_nodes(tmp_path: Path) -> None:
    assert new([str(tmp_path / "trial")]) == 0
    words = (
        *("rounds=2", "data.name=digits", "data.path=null", "data.num_clients=2", "data.partition=iid"),
        *("model.name=logistic_regression", "training.batch_size=36", "server.momentum=0"),
        *("sampling.probability=1", "sampling.min_nodes=2"),
    )
    with federation_of(demonstration(2), tmp_path / "federation") as federation:
        run = federation.run("run", *PER_EXAMPLE, *words, app=tmp_path / "trial")
        federation.finish(run)
    assert state_of(run) == "finished"
    assert [(row["round"], row["replies"]) for row in run.read_metrics()] == [(1, 2), (2, 2)]
    assert 0 < (run.read_metrics()[-1]["epsilon_example"] or 0) < 10


def test_nodes_rate_the_last_model_and_charge_their_answers(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    words = (
        *("rounds=1", "data.num_clients=2", "model.name=linear", "training.batch_size=100", "training.epochs=1"),
        *("privacy.user.noise_multiplier=null", "privacy.example.target_epsilon=null"),
        *("evaluation.kind=private", "evaluation.noise_multiplier=3"),
    )
    assert main(["--nodes", "2", *PER_EXAMPLE, *words, f"output_dir={run.path}"]) == 0
    assert state_of(run) == "finished"
    (row,) = run.read_metrics()
    assert row["accuracy"] is not None
    # Of 1437 examples each node has about 718, and holds about 143 out: 3 / 143 on an answer, half of it on the share.
    assert row["accuracy_error"] == pytest.approx(1.5 / 143 / 2**0.5, rel=0.02)
    for number in range(2):
        entries = DurableLedger(run.path / "nodes" / f"node-{number}.db").spent("example").entries
        assert [count for event, count in entries if event == GaussianDpEvent(3.0)] == [1]


def test_three_nodes_train_on_sequences_of_their_own_length(tmp_path: Path) -> None:
    for number, length in enumerate(LENGTHS):
        node = folder(tmp_path / "nodes" / f"node{number}")
        tokens, tags = rows(30, seed=number, longest=length)
        np.savez(node / "train.npz", inputs=tokens[:, :length], tags=tags[:, :length], who=np.zeros(30))
    words = ("data.name=folder", "data.num_clients=3", "model.name=lstm", "rounds=1")
    server = (f"data.path={folder(tmp_path / 'servers')}", f"output_dir={tmp_path / 'run'}")
    assert main(["--data", str(tmp_path / "nodes"), *PER_EXAMPLE, *words, *server]) == 0
    (row,) = RunFolder(tmp_path / "run").read_metrics()
    assert row["replies"] == 3
    assert 0 < (row["epsilon_example"] or 0) < 10
    assert row["accuracy"] is not None
