"""Two SuperNodes as processes on loopback, with TLS and node authentication: they train, and survive their server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from discreet.deployment.flower_home import wait_until
from discreet.deployment.local_federation import RUN_SECONDS, Federation, empty_federation
from discreet.ledger.durable_ledger import DurableLedger
from discreet.node.nodes import share_of
from discreet.server.run_folder import RunFolder
from discreet.settings.compose import load_config
from discreet.simulation.in_process import simulate

NODES = ["node-0", "node-1"]
BOTH = ("data.num_clients=2", "privacy.delta=0.001", "sampling.kind=everyone", "sampling.min_nodes=2")
# The rounds are slow where the machine is: nothing here depends on how long they take.
PATIENT = "server.round_timeout=240"
PRIVATE = ("privacy.user.noise_multiplier=2", "privacy.example.enabled=true", "privacy.example.noise_multiplier=2")
# All examples in one batch, and no kink in the model: the last bits, in which engines differ, would decide on its side.
NONE = ("privacy.user.enabled=false", "training.batch_size=1024", "model.name=linear")


def own_data(folder: Path) -> Path:
    """Partition 0 as the data folder that node 0 serves instead."""
    folder.mkdir()
    examples = share_of(load_config(BOTH).data, 0)
    rows = (examples.inputs.reshape(len(examples), -1).numpy() * 16).astype(int)
    lines = [",".join([*map(str, row), str(int(target))]) for row, target in zip(rows, examples.targets, strict=True)]
    head = ",".join([*(f"p{number}" for number in range(64)), "digit"])
    (folder / "scans.csv").write_text("\n".join([head, *lines]) + "\n")
    (folder / "data.toml").write_text('format = "csv"\nfile = "scans.csv"\ntarget = "digit"\nlow = 0\nhigh = 16\n')
    return folder


def start_nodes(federation: Federation) -> None:
    data = own_data(federation.folder / "data")
    for number, name in enumerate(NODES):
        words = ["--data", str(data), "--task", "digits"] if number == 0 else ["--partition", str(number), "--of", "2"]
        federation.start_node(name, *words)
    federation.wait_for_nodes(NODES)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with empty_federation(tmp_path_factory.mktemp("federation"), NODES) as federation:
        start_nodes(federation)
        yield federation


def rounds_of(folder: RunFolder) -> list[int]:
    return [int(row["round"] or 0) for row in folder.read_metrics()]


def test_it_trains_and_what_the_server_did_before_a_kill_is_kept(federation: Federation) -> None:
    folder = federation.run("private", "rounds=2", PATIENT, *BOTH, *PRIVATE)
    wait_until(lambda: rounds_of(folder), RUN_SECONDS, "the first round is done")

    federation.kill("superlink")
    before = DurableLedger(folder.ledger_path)
    assert before.verify() == []
    spent, epsilon = len(before.releases()), before.spent("user").epsilon(0.001, "pld")

    federation.start_superlink()
    resumed = federation.run("private", "rounds=2", PATIENT, "resume=true", *BOTH, *PRIVATE)
    federation.finish(resumed)
    ledger = DurableLedger(folder.ledger_path)
    assert rounds_of(folder) == [1, 2]
    assert ledger.verify() == []
    assert len(ledger.releases()) >= max(2, spent)
    assert ledger.spent("user").epsilon(0.001, "pld") > epsilon


def test_each_node_keeps_an_account_of_its_own(federation: Federation) -> None:
    folder = RunFolder(federation.folder / "private")
    assert folder.read_metrics()[-1]["replies"] == 2
    ledgers = [DurableLedger(federation.folder / f"{name}.db") for name in NODES]
    spent = [ledger.spent("example").epsilon(0.001, "pld") for ledger in ledgers]
    assert all(epsilon > 0 for epsilon in spent)
    assert folder.read_metrics()[-1]["epsilon_example"] == pytest.approx(max(spent))


@pytest.mark.slow
def test_the_result_is_the_simulations_without_noise(federation: Federation, tmp_path: Path) -> None:
    # Both go on from one checkpoint: a real federation refuses a seed, so their first parameters would differ.
    simulated = tmp_path / "simulated"
    simulate(load_config(["rounds=1", *BOTH, *NONE, f"output_dir={simulated}"]))
    shutil.copytree(simulated, federation.folder / "plain")
    simulate(load_config(["rounds=2", *BOTH, *NONE, "resume=true", f"output_dir={simulated}"]))
    plain = federation.run("plain", "rounds=2", PATIENT, "resume=true", *BOTH, *NONE)
    federation.finish(plain)
    assert plain.read_metrics()[-1]["replies"] == 2
    expected, found = (load_file(folder / "model.safetensors") for folder in (simulated, plain.path))
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=2e-6)
