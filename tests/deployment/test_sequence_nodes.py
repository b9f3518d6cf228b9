"""Real nodes with sequences of their own, each padded to a length of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from discreet.deployment.local_federation import main
from discreet.federated.run_folder import RunFolder
from tests.sequences import folder, rows

LENGTHS = (2, 4, 6)
WORDS = ("data.name=folder", "data.num_clients=3", "model.name=lstm", "sampling.kind=everyone", "rounds=1")
PRIVACY = (
    *("privacy.user.enabled=false", "privacy.user.target_epsilon=null"),
    *("privacy.example.enabled=true", "privacy.example.noise_multiplier=1"),
)


@pytest.mark.slow
def test_three_nodes_train_on_sequences_of_their_own_length(tmp_path: Path) -> None:
    for number, length in enumerate(LENGTHS):
        node = folder(tmp_path / "nodes" / f"node{number}")
        tokens, tags = rows(30, seed=number, longest=length)
        np.savez(node / "train.npz", inputs=tokens[:, :length], tags=tags[:, :length], who=np.zeros(30))
    server = (f"data.path={folder(tmp_path / 'servers')}", f"output_dir={tmp_path / 'run'}")
    assert main(["--data", str(tmp_path / "nodes"), *WORDS, *PRIVACY, *server]) == 0
    (row,) = RunFolder(tmp_path / "run").read_metrics()
    assert row["replies"] == 3
    assert 0 < (row["epsilon_example"] or 0) < 10
    assert row["accuracy"] is not None
