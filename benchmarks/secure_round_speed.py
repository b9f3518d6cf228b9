"""The price of secure aggregation in a real federation: `discreet benchmark secure_round`.

One SuperLink, a node proxy, and SuperNode processes, all on this machine, with TLS and node keys,
and a model of a million parameters: plain rounds, whose updates the server reads, and rounds under
secure aggregation, which are three exchanges instead of one. The goal is at most 1.6 times the
time. Also measured: the seconds that a node takes to mask a million values for this number of
peers; the goal is at most 0.3 s.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.load_speed import MEBIBYTE, PATIENCE_SECONDS, ServerWatch, finish
from benchmarks.side_by_side import Row
from discreet.deployment.local_federation import Federation, federation_of
from discreet.masking.masks import KEY_BYTES, add_mask
from examples.million import million

VALUES = 10**6
MODEL = f"{million.__module__}:{million.__name__}"
WARM_UP = 1  # the first round of a run installs the app on every node
EXAMPLES, CLASSES = 30, 10  # of each node; of the task digits
SECURE = ("privacy.user.aggregation=secure", "privacy.accountant=rdp", "privacy.secure.dropouts=2")


def rows(nodes: int = 20, rounds: int = 3) -> list[Row]:
    """Median seconds of a round without and with masks, their ratio, peaks of memory of the
    server's processes in MiB, and the seconds of masking at a node."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--data", str(make_data(Path(folder) / "data")), "--task", "digits"]
        with federation_of([words] * nodes, Path(folder) / "federation") as federation:
            plain = _rounds(federation, "plain", nodes=nodes, rounds=rounds)
            secure = _rounds(federation, "secure", nodes=nodes, rounds=rounds, more=SECURE)
    ratio = secure["seconds"] / plain["seconds"]
    return [plain | {"ratio": 1.0}, secure | {"ratio": ratio, "masks": masking_seconds(nodes)}]


def make_data(folder: Path) -> Path:
    """A node's data with a description that allows this model: made up, as nothing is learned
    here."""
    folder.mkdir(parents=True)
    inputs = np.arange(EXAMPLES * 64, dtype=np.float32).reshape(EXAMPLES, 1, 8, 8) % 17
    np.savez(folder / "made.npz", inputs=inputs, digit=np.arange(EXAMPLES) % CLASSES)
    facts = (
        f'format = "npz"\nfile = "made.npz"\ntarget = "digit"\nlow = 0\nhigh = 16\nmodel = '
        f'"{MODEL}"\n'
    )
    (folder / "data.toml").write_text(facts)
    return folder


def _rounds(
    federation: Federation, what: str, *, nodes: int, rounds: int, more: Sequence[str] = ()
) -> Row:
    words = (
        f"rounds={rounds + WARM_UP}",
        f"data.num_clients={nodes}",
        f"sampling.min_nodes={nodes}",
    )
    light = (
        f"model.name={MODEL}",
        "training.epochs=1",
        f"training.batch_size={EXAMPLES}",
        "sampling.kind=everyone",
    )
    privacy = (
        "privacy.user.noise_multiplier=4",
        f"privacy.delta={0.5 / nodes}",
        "privacy.user.too_noisy=warn",
    )
    watch = ServerWatch(federation)
    folder = federation.run(
        what, *words, *light, *privacy, *more, f"server.round_timeout={PATIENCE_SECONDS}"
    )
    finish(federation, folder, watch)
    measured = folder.read_metrics()[WARM_UP:]
    seconds = statistics.median(row["seconds"] or 0.0 for row in measured)
    memory = {name: round(size / MEBIBYTE) for name, size in watch.peaks.items()}
    replies = sum(row["replies"] or 0 for row in measured)
    return {"what": what, "nodes": nodes, "replies": replies, "seconds": seconds} | memory


def masking_seconds(nodes: int) -> float:
    """The seconds that a node takes to add its own mask, and one for each other node, to a million
    values."""
    total, started = np.zeros(VALUES, dtype=np.uint32), time.perf_counter()
    for _ in range(nodes):
        add_mask(total, os.urandom(KEY_BYTES), subtract=False)
    return time.perf_counter() - started
