"""A server that is killed between any two exchanges of a masked sum, in one federation of real processes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from discreet.deployment.flower_home import wait_until
from discreet.deployment.local_federation import Federation
from discreet.deployment.superlink import SERVER_APP
from discreet.ledger.durable_ledger import DurableLedger
from discreet.masking.store import FolderStore, NodeState, read_state
from discreet.masking.wire import Stage
from discreet.server.run_folder import RunFolder, state_of
from discreet.settings.compose import load_config
from discreet.simulation.in_process import simulate
from discreet.simulation.processes import below
from tests.deployment.ends import RUN_SECONDS, finish, kill
from tests.deployment.held_server import OPENED, SEED, federation_with, held_main

NODES = ["node-0", "node-1", "node-2"]
ROUNDS = 2
# Where it is killed: before a stage is sent, or when the sum is open and nothing is written yet.
PLACES = {"SHARES": Stage.KEYS, "MASKED": Stage.SHARES, "CONFIRM": Stage.MASKED, "UNMASK": Stage.CONFIRM, OPENED: None}
NODES_PAID, SERVER_PAID = 3, 2  # of these: after masked vectors have left, after the server was to ask for shares
SETTINGS = (
    *("data.name=breast_cancer", f"data.num_clients={len(NODES)}", f"rounds={ROUNDS}", "privacy.delta=0.001"),
    *("model.name=logistic_regression", "training.epochs=1", "training.batch_size=1000"),
    *("sampling.kind=everyone", f"sampling.min_nodes={len(NODES)}", "server.round_timeout=240"),
    *("privacy.user.aggregation=secure", "privacy.accountant=rdp", "privacy.secure.dropouts=0"),
    *("privacy.user.noise_multiplier=1e-9", "privacy.user.too_noisy=warn", "privacy.user.clip.kind=fixed"),
)


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    with federation_with(held_main, tmp_path, NODES) as federation:
        for number, name in enumerate(NODES):
            federation.start_node(name, "--partition", str(number), "--of", str(len(NODES)))
        federation.wait_for_nodes(NODES)
        yield federation


def killed_at(place: str, federation: Federation, *words: str) -> None:
    """Runs until the server holds at that place, and kills all of it: SuperLink and ServerApp."""
    held = federation.folder / "held"
    (federation.folder / "hold").write_text(place)
    federation.run("run", *words)
    wait_until(held.exists, RUN_SECONDS, f"the server holds at {place}")
    apps = below(federation.processes["superlink"].pid, SERVER_APP)
    assert apps
    kill(federation, "superlink")
    for pid in apps:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    held.unlink()
    federation.start_superlink()


def releases(path: Path) -> int:
    """The number of sums that a ledger has paid for."""
    return DurableLedger(path).spent("user").num_releases


def states(folder: Path) -> dict[str, NodeState]:
    """The state of a node, by the name of the run of a server's process."""
    found = {path.stem: FolderStore(folder).load(path.stem) for path in folder.glob("*.state")}
    return {run: read_state(state) for run, state in found.items() if state is not None}


@pytest.mark.slow
def test_a_server_killed_between_any_two_exchanges_ends_with_the_model_of_a_run_that_was_not(
    federation: Federation,
) -> None:
    words = SETTINGS
    for place in PLACES:
        killed_at(place, federation, *words)
        words = ("resume=true", *SETTINGS)
    (federation.folder / "hold").write_text("")
    folder = federation.run("run", *words)
    finish(federation, folder)

    assert state_of(folder) == "finished"
    assert [(row["round"], row["replies"]) for row in folder.read_metrics()] == [(1, 3), (2, 3)]
    check_model(folder, federation.folder / "undisturbed")
    assert DurableLedger(folder.ledger_path).verify() == []
    assert releases(folder.ledger_path) == SERVER_PAID + ROUNDS
    opened = check_opened(federation.folder / "unmasked")
    for name in NODES:
        check_node(name, federation, opened)


def check_model(folder: RunFolder, undisturbed: Path) -> None:
    """The last model is that of clients in one process, without masks, but for a few steps of the grid and of noise."""
    simulate(load_config([*SETTINGS, f"seed={SEED}", f"output_dir={undisturbed}"]))
    there, here = folder.load_checkpoint(), RunFolder(undisturbed).load_checkpoint()
    assert there is not None
    assert here is not None
    assert here.params.abs().max() > 0.05
    assert torch.allclose(there.params, here.params, atol=1e-3)


def check_opened(path: Path) -> set[str]:
    """Each sum was opened once, for all nodes, by one share of each; the runs of which one was."""
    facts = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(fact["sets"] == [NODES, []] for fact in facts)
    given = [(fact["run"], fact["round"], fact["name"]) for fact in facts]
    assert len(given) == len(set(given)) == len(NODES) * (1 + ROUNDS)
    return {fact["run"] for fact in facts}


def check_node(name: str, federation: Federation, opened: set[str]) -> None:
    """It paid for each vector that left it, gave no share in the runs that were killed before, and stands where each
    of them was killed."""
    paid = releases(federation.folder / f"{name}.db")
    assert paid == federation.says(name).count("a masked vector of") == NODES_PAID + ROUNDS
    remembered = states(federation.folder / f"{name}.masking")
    assert {run for run, state in remembered.items() if state.closed >= 1} == opened
    left = [state.attempts[1].stage for run, state in remembered.items() if run not in opened]
    assert sorted(left) == sorted(stage for stage in PLACES.values() if stage is not None)
