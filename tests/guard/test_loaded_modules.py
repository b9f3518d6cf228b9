"""What the process of a guard loads: what it needs to answer, and nothing of a server."""

from __future__ import annotations

import subprocess
import sys

import pytest

MOST_LINES = 13_000
PROGRAM = """
import inspect, sys
import discreet.deployment.flower_fixes.supernode_guard
loaded = {name: each for name, each in sys.modules.items() if name.split(".")[0] == "discreet"}
print(sum(len(inspect.getsource(each).splitlines()) for each in loaded.values()))
print(*{name.split(".")[1] for name in loaded if "." in name})
"""


@pytest.mark.processes  # as test_loaded_by_a_node.py, and flwr loads for seconds
def test_a_guards_process_loads_at_most_13_000_lines_and_no_server() -> None:
    lines, rooms = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert int(lines) <= MOST_LINES
    unneeded = {"server", "planning", "queries", "data", "models", "layers", "training", "dpsgd"}
    assert not unneeded & set(rooms.split())
