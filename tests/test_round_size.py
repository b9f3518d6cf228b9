"""What a reader must hold in mind of one round, and of one request at a node, counted from calls."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import pytest
import torch
from flwr.app import Context, Message, RecordDict

import discreet
from discreet.flower.serving import encode_request, parameters_record
from discreet.ledger.durable_ledger import DurableLedger
from discreet.node.app import train
from discreet.run_files.compose import load_asked
from discreet.server import training_run
from discreet.simulation.in_process import simulate
from tests.node.clients import config, request

PACKAGE = str(Path(discreet.__file__).parent) + os.sep
# 15 % above what was measured (150 functions, 28 files, 14 deep, 19 stays): growth is noticed, and
# no code is bent to meet a number.
MOST_FUNCTIONS = 172  # Python before 3.12 counts comprehensions too
MOST_FILES = 32
MOST_DEEP = 16  # from `simulate` on; a seed, without which this would be chance, takes 3 of them
MOST_STAYS = 21
# A node's way through a request; other rooms are called from it.
ROOMS = ("node", "protocol", "mechanisms", "queries", "flower")


@dataclass
class Calls:
    """The calls of functions of the package, as a profiler sees them."""

    functions: set[tuple[str, str]] = field(default_factory=set)
    stays: list[str] = field(default_factory=list)
    depth: int = 0
    deepest: int = 0

    @property
    def files(self) -> set[str]:
        return {name for name, _ in self.functions}

    def see(self, frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if not name.startswith(PACKAGE) or event not in ("call", "return"):
            return
        if event == "return":
            self.depth -= 1
            return
        name = name.removeprefix(PACKAGE)
        self.depth += 1
        self.deepest = max(self.deepest, self.depth)
        self.functions.add((name, frame.f_code.co_qualname))
        if name.split(os.sep)[0] in ROOMS and self.stays[-1:] != [name]:
            self.stays.append(name)


@contextmanager
def watched(calls: Calls) -> Iterator[None]:
    before = sys.getprofile()
    sys.setprofile(calls.see)
    try:
        yield
    finally:
        sys.setprofile(before)


def test_a_round_enters_few_functions_in_few_files_and_is_not_deep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls()
    found = []
    real = training_run.round_line

    def line(row: dict[str, object], *, rounds: int) -> str:
        found.append((len(calls.functions), len(calls.files), calls.deepest))
        calls.functions.clear()
        calls.deepest = 0
        return real(row, rounds=rounds)

    monkeypatch.setattr(training_run, "round_line", line)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})  # no workers
    words = ("rounds=3", "data.num_clients=40", "seed=20897", f"output_dir={tmp_path / 'run'}")
    noise = ("privacy.user.noise_multiplier=4", "privacy.user.too_noisy=warn")
    asked = load_asked([*words, *noise])
    with watched(calls):
        simulate(*asked)
    functions, files, deepest = found[-1]  # the first rounds also decide what is decided once
    assert functions <= MOST_FUNCTIONS
    assert files <= MOST_FILES
    assert deepest <= MOST_DEEP


def test_a_request_makes_few_stays_at_a_node(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.db"
    DurableLedger.create(ledger)
    words = ("privacy.user.noise_multiplier=4", "rounds=4", "data.num_clients=12")
    asked = request(config(*words, "model.name=linear"), 1, clip_norm=1.0)
    content = encode_request(asked, parameters_record(torch.zeros(650)))
    node = {"partition-id": 1, "num-partitions": 12, "ledger": str(ledger)}
    calls = Calls()
    with watched(calls):
        reply = train(Message(content, 1, "train"), Context(1, 1, node, RecordDict(), {}))
    assert not reply.has_error()
    assert len(calls.stays) <= MOST_STAYS, calls.stays
