"""What secure aggregation costs in a real federation: `discreet benchmark secure_round`, or with another number of
nodes `python -m benchmarks.secure_round_speed --nodes 10`.

The federation of `benchmarks.deployment_speed`, with ClientApps ready, twice: rounds whose updates the server reads,
and rounds under secure aggregation, which are three exchanges in place of one. The bar is 1.6 times as long. Beside it:
how long a node takes to mask a million values for so many peers, at most 0.3 s.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.deployment_speed import discreet_rounds, make_data, row_of
from discreet.cli.benchmark import table_of
from discreet.deployment.local_federation import federation_of
from discreet.masking.masks import KEY_BYTES, add_mask

VALUES = 10**6
SECURE = ("privacy.user.aggregation=secure", "privacy.accountant=rdp", "privacy.secure.dropouts=2")

Rows = list[dict[str, Any]]


def rows(nodes: int = 20, rounds: int = 3) -> Rows:
    """Seconds of a round (the median) without and with masks, their ratio, and the masks' seconds at a node."""
    masks = masking_seconds(nodes)
    with tempfile.TemporaryDirectory() as folder:
        words = ["--data", str(make_data(Path(folder) / "data")), "--task", "digits"]
        with federation_of([words] * nodes, Path(folder) / "federation") as federation:
            plain = row_of("in the clear", nodes, **discreet_rounds(federation, nodes=nodes, rounds=rounds))
            found = discreet_rounds(federation, nodes=nodes, rounds=rounds, more=SECURE)
            secure = row_of("secure aggregation", nodes, **found)
    return [
        plain | {"ratio": 1.0, "masks": 0.0},
        secure | {"ratio": secure["seconds"] / plain["seconds"], "masks": masks},
    ]


def masking_seconds(nodes: int) -> float:
    """How long a node takes to add its own mask and one for each other node to a million values."""
    total, started = np.zeros(VALUES, dtype=np.uint32), time.perf_counter()
    for _ in range(nodes):
        add_mask(total, os.urandom(KEY_BYTES), subtract=False)
    return time.perf_counter() - started


def main(words: Sequence[str]) -> int:
    """Measures with another number of nodes than the section has."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.secure_round_speed", description=__doc__)
    parser.add_argument("--nodes", type=int, default=20, help="SuperNode processes; each takes about 300 MB")
    parser.add_argument("--rounds", type=int, default=3, help="of each kind, after a first one that is not counted")
    arguments = parser.parse_args(words)
    Console().print(table_of(rows(arguments.nodes, arguments.rounds)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
