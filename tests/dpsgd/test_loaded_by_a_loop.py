"""What a training loop of one's own loads: the engine, its ledger and what they need."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

MOST_LINES = 10_000
MOST_LINES_AFTER_TRAINING = 11_000  # with the accountant
IMPORTED = """
import inspect, sys
from discreet import DPSGD, LoopPrivacy
import discreet.privacy.rounded_sums
"""
TRAINED = """
import torch
from torch.utils.data import TensorDataset
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
data = TensorDataset(torch.ones(40, 3), torch.zeros(40, dtype=torch.int64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
noise = LoopPrivacy(noise_multiplier=1.0)
private = DPSGD(model, optimizer, data, batch_size=10, epochs=1, delta=1e-3, privacy=noise)
for inputs, targets in private:
    private.step(inputs, targets)
private.epsilon()
"""
COUNTED = """
loaded = {name: each for name, each in sys.modules.items() if name.split(".")[0] == "discreet"}
print(sum(len(inspect.getsource(each).splitlines()) for each in loaded.values()))
print(*{name.split(".")[1] for name in loaded if "." in name})
print(*{name.split(".")[0] for name in sys.modules})
"""


def loaded_by(program: str) -> tuple[int, set[str], set[str]]:
    """The lines, the rooms and the libraries that a program has loaded."""
    lines, rooms, libraries = subprocess.run(
        [sys.executable, "-c", program + COUNTED], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return int(lines), {*rooms.split()}, {*libraries.split()}


def test_a_loop_loads_at_most_10_000_lines_and_neither_a_federation_nor_tables() -> None:
    lines, rooms, libraries = loaded_by(IMPORTED)
    assert lines <= MOST_LINES
    unneeded = {"server", "node", "flower", "planning", "queries", "training", "models", "tables"}
    assert not unneeded & rooms
    assert not {"flwr", "hydra", "pandas", "sklearn", "matplotlib", "rich"} & libraries


def test_a_loop_that_has_trained_on_rows_of_tensors_has_loaded_at_most_11_000_lines() -> None:
    lines, rooms, _ = loaded_by(IMPORTED + TRAINED)
    assert lines <= MOST_LINES_AFTER_TRAINING
    assert rooms <= {
        "ledger",
        "layers",
        "privacy",
        "dpsgd",
        "settings",
        "per_example",
        "accounting",
    }
