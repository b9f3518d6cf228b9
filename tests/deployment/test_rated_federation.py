"""Private evaluation in a federation of processes: each node noises its own answer and charges its own ledger."""

from __future__ import annotations

from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent

from discreet.deployment.local_federation import main
from discreet.federated.durable_ledger import DurableLedger
from discreet.federated.run_folder import RunFolder, state_of

WORDS = (
    *("rounds=1", "data.num_clients=2", "model.name=linear", "sampling.kind=everyone", "privacy.user.enabled=false"),
    *("privacy.user.target_epsilon=null", "privacy.user.noise_multiplier=null", "privacy.example.target_epsilon=null"),
    *("privacy.example.enabled=true", "privacy.example.noise_multiplier=2", "training.batch_size=100"),
    *("training.epochs=1", "evaluation.kind=private", "evaluation.noise_multiplier=3"),
)


@pytest.mark.slow
def test_nodes_rate_the_last_model_and_charge_their_answers(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    assert main(["--nodes", "2", *WORDS, f"output_dir={run.path}"]) == 0
    assert state_of(run) == "finished"
    (row,) = run.read_metrics()
    assert row["accuracy"] is not None
    # Of 1437 examples each node has about 718, and holds about 143 out: 3 / 143 on an answer, half of it on the share.
    assert row["accuracy_error"] == pytest.approx(1.5 / 143 / 2**0.5, rel=0.02)
    for number in range(2):
        entries = DurableLedger(run.path / "nodes" / f"node-{number}.db").spent("example").entries
        assert [count for event, count in entries if event == GaussianDpEvent(3.0)] == [1]
