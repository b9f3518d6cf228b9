"""What a node has loaded once it has answered a message: what its owner would have to read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from discreet.ledger.durable_ledger import DurableLedger
from discreet.protocol.messages import request_items
from tests.node.clients import EXAMPLE, config, request

MOST_LINES = 20_000
LINEAR = ("data.num_clients=12", "model.name=logistic_regression", "privacy.delta=1e-3")
TABLE = """format = "csv"
file = "train.csv"
target = "ill"
classes = ["0", "1"]

[columns.age]
kind = "number"
low = 0
high = 120

[columns.sex]
kind = "category"
levels = ["f", "m"]
"""
PROGRAM = """
import inspect, json, sys
import numpy as np
from client_app.client_app import app
from discreet.node.app import DPClient

node, items, size = json.loads(sys.argv[1])
arrays, _, _ = DPClient(node).fit([np.zeros(size, np.float32)], items)
loaded = {name: each for name, each in sys.modules.items() if name.split(".")[0] == "discreet"}
print(arrays[0].size)
print(sum(len(inspect.getsource(each).splitlines()) for each in loaded.values()))
print(*{name.split(".")[1] for name in loaded if "." in name})
"""


def with_a_share_of_digits(folder: Path) -> tuple[dict[str, object], str, int]:
    """The keys of a node, the name of its data, and the parameters of their linear model."""
    return {"partition-id": 3, "num-partitions": 12, "task": "digits"}, "digits", 650


def with_a_table_of_its_own(folder: Path) -> tuple[dict[str, object], str, int]:
    rows = [f"{20 + row},{'fm'[row % 2]},{row % 3 // 2}" for row in range(60)]
    (folder / "train.csv").write_text("\n".join(["age,sex,ill", *rows, ""]))
    (folder / "data.toml").write_text(TABLE)
    return {"data": str(folder)}, "folder", 10


@pytest.mark.processes
@pytest.mark.parametrize("made", [with_a_share_of_digits, with_a_table_of_its_own])
def test_a_node_that_has_trained_has_loaded_at_most_20_000_lines_and_no_server(
    made: Callable[[Path], tuple[dict[str, object], str, int]], tmp_path: Path
) -> None:
    DurableLedger.create(tmp_path / "ledger.db")
    node, name, parameters = made(tmp_path)
    node["ledger"] = str(tmp_path / "ledger.db")
    items = request_items(request(config(*EXAMPLE, *LINEAR, f"data.name={name}")))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([node, items, parameters])],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    size, lines, rooms = done.stdout.splitlines()[-3:]
    assert int(size) == parameters
    assert int(lines) <= MOST_LINES
    assert not {"server", "planning", "flower", "simulation", "reporting"} & {*rooms.split()}
