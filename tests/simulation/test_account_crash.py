"""kill -9 of two runs at once that charge one account: nothing is forgotten, and both go on."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from discreet.ledger.durable_ledger import DurableLedger
from discreet.server.population_account import ADJACENCIES, Population, create_account
from discreet.server.run_folder import RunFolder
from discreet.settings.compose import load_config
from discreet.simulation.in_process import simulate
from tests.simulation.crash import AFTER_ACCOUNT, crash_all

ROUNDS, KILLED = 3, 2
SMALL = (
    *(f"rounds={ROUNDS}", "data.num_clients=20", "model.name=logistic_regression", "training.epochs=1"),
    *("sampling.population_name=people", "privacy.user.noise_multiplier=2", "privacy.user.too_noisy=warn"),
)
# (of the first run, of the second one): where each is killed in round 2.
POINTS = (
    ("before_ledger", AFTER_ACCOUNT),
    (AFTER_ACCOUNT, "after_ledger"),
    ("before_checkpoint", AFTER_ACCOUNT),
    ("after_checkpoint", "before_metrics"),
)


def charged(path: Path, folder: Path) -> int:
    """How many releases the account knows of a run."""
    ledger, identity = DurableLedger(path), DurableLedger(folder / "ledger.db").position().identity
    (data_owner,) = (run for run in ledger.data_owners("user") if run.endswith(identity))
    return ledger.spent("user", data_owner=data_owner).num_releases


@pytest.mark.parametrize("points", POINTS, ids=" and ".join)
def test_two_runs_that_are_killed_at_once_forget_nothing(points: tuple[str, str], tmp_path: Path) -> None:
    path, folders = tmp_path / "people.db", [tmp_path / "first", tmp_path / "second"]
    create_account(path, Population("people", 20, ADJACENCIES[0], 1e-3))
    words = [[*SMALL, f"privacy.user.account={path}", f"output_dir={folder}"] for folder in folders]
    runs = [(point, KILLED, each) for point, each in zip(points, words, strict=True)]
    assert crash_all(runs) == [-signal.SIGKILL] * 2
    for folder in folders:
        done = RunFolder(folder).load_checkpoint()
        assert done is not None
        own = DurableLedger(folder / "ledger.db").spent("user").num_releases
        assert done.round <= own <= charged(path, folder) <= done.round + 1
    before = [charged(path, folder) for folder in folders]
    for number, each in enumerate(words):
        done = RunFolder(folders[number]).load_checkpoint()
        simulate(load_config([*each, "resume=true"]))
        assert done is not None
        assert charged(path, folders[number]) == before[number] + ROUNDS - done.round
    assert DurableLedger(path).verify() == []
    said = json.loads((folders[1] / "privacy.json").read_text())["account"]
    assert said["releases"] == sum(charged(path, folder) for folder in folders)
