"""What a training loop of one's own loads: the engine, its ledger and what they need."""

from __future__ import annotations

import subprocess
import sys

MOST_LINES = 12_000
PROGRAM = """
import inspect, sys
from discreet import DPSGD, LoopPrivacy
import discreet.privacy.rounded_sums
loaded = {name: each for name, each in sys.modules.items() if name.split(".")[0] == "discreet"}
print(sum(len(inspect.getsource(each).splitlines()) for each in loaded.values()))
print(*{name.split(".")[1] for name in loaded if "." in name})
print(*{name.split(".")[0] for name in sys.modules})
"""


def test_a_loop_loads_at_most_12_000_lines_and_neither_a_federation_nor_tables() -> None:
    lines, rooms, libraries = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert int(lines) <= MOST_LINES
    unneeded = {"server", "node", "flower", "planning", "queries", "training", "models", "tables"}
    assert not unneeded & set(rooms.split())
    assert not {"flwr", "hydra", "pandas", "sklearn", "matplotlib", "rich"} & {*libraries.split()}
