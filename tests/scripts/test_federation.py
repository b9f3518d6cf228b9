"""`flwr run` for real: Flower's simulation runtime, from a copy of the app, as `scripts/run` starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from discreet.config import load_config
from discreet.durable_ledger import DurableLedger
from discreet.runs import RunFolder
from scripts.federation import flower_environment, free_port, main
from simulation.in_process import simulate

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = ["data.num_clients=8", "sampling.probability=0.5", "model.name=logistic_regression", "training.epochs=2"]
DEADLINE = 180

pytestmark = pytest.mark.slow


def start(words: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "scripts.federation", *words]
    return subprocess.Popen(command, cwd=ROOT, start_new_session=True)


def test_the_default_experiment_learns_digits_within_its_budget(tmp_path: Path) -> None:
    assert main([f"output_dir={tmp_path / 'run'}", "seed=48017"]) == 0
    last = RunFolder(tmp_path / "run").read_metrics()[-1]
    assert last["accuracy"] is not None
    assert last["accuracy"] >= 0.90
    assert DurableLedger(tmp_path / "run" / "ledger.db").spent("user").epsilon(1e-3) <= 8


@pytest.mark.parametrize(
    ("engine", "guarantees"),
    [
        ("one_by_one", []),
        ("batched", ["privacy.example.enabled=true", "privacy.example.noise_multiplier=1"]),
        ("batched", ["data.partition=sampled", "data.examples_per_client=20"]),
    ],
)
def test_flowers_runtime_and_the_simulation_give_the_same_numbers(
    engine: str, guarantees: list[str], tmp_path: Path
) -> None:
    words = [*SMALL, *guarantees, "rounds=3", "seed=31481", "privacy.user.noise_multiplier=0.5"]
    assert main([*words, f"output_dir={tmp_path / 'flower'}"]) == 0
    simulate(load_config([*words, f"engine={engine}", f"output_dir={tmp_path / 'alone'}"]))
    flower, alone = (RunFolder(tmp_path / name) for name in ("flower", "alone"))
    there, here = flower.load_checkpoint(), alone.load_checkpoint()
    assert there is not None
    assert here is not None
    assert torch.allclose(there.params, here.params, atol=1e-5)
    assert there.clip_norm == pytest.approx(here.clip_norm)
    assert there.epsilon_example == pytest.approx(here.epsilon_example)
    columns = ("cohort", "replies", "epsilon_user", "fraction_below")
    for ours, theirs in zip(alone.read_metrics(), flower.read_metrics(), strict=True):
        assert [ours[name] for name in columns] == pytest.approx([theirs[name] for name in columns])


def test_a_killed_flwr_run_is_resumed_with_its_ledger(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    words = [*SMALL, "privacy.user.noise_multiplier=1", f"output_dir={folder.path}"]
    process = start([*words, "rounds=500"])
    try:
        deadline = time.monotonic() + DEADLINE
        while len(folder.read_metrics()) < 2 and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.1)
    finally:
        kill_everything(process)
    done = folder.load_checkpoint()
    assert done is not None
    assert main([*words, "resume=true", f"rounds={done.round + 2}"]) == 0
    after = folder.load_checkpoint()
    assert after is not None
    assert after.round == done.round + 2
    ledger = DurableLedger(folder.ledger_path)
    assert ledger.spent("user").num_releases - after.round in (0, 1)
    assert ledger.verify() == []


def kill_everything(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL for the command and for the SuperLink that it started in a session of its own."""
    children = subprocess.run(["ps", "-eo", "pid,ppid,pgid"], capture_output=True, text=True, check=True).stdout
    rows = [tuple(map(int, line.split())) for line in children.splitlines()[1:]]
    family = {process.pid}
    for _ in range(6):
        family |= {pid for pid, parent, _ in rows if parent in family}
    for pid in family:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait(30)


def test_a_plain_flwr_run_works_with_two_nodes(tmp_path: Path) -> None:
    """The command of the README, on the local SuperLink that `flwr run` starts by itself."""
    port = str(free_port())
    environment = flower_environment(tmp_path / "home") | {"FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": port}
    overrides = " ".join([*SMALL, "rounds=2", f"output_dir={tmp_path / 'run'}"])
    command = ["flwr", "run", ".", "--stream", "--run-config", f'overrides="{overrides}"']
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False
        )
        assert "round 2/2" in done.stdout, done.stdout + done.stderr
        assert (tmp_path / "run" / "privacy.json").exists()
    finally:
        subprocess.run(["pkill", "-f", f"flower-superlink.*--port {port}"], check=False)


def test_a_wrong_setting_of_a_plain_flwr_run_is_one_line_and_asks_nobody(tmp_path: Path) -> None:
    port = str(free_port())
    environment = flower_environment(tmp_path / "home") | {"FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": port}
    command = ["flwr", "run", ".", "--stream", "--run-config", 'overrides="privacy.delta=1"']
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False
        )
        assert "discreet: privacy.delta must be within (0, 1) (got 1.0)" in done.stdout
        assert "round 1" not in done.stdout
    finally:
        subprocess.run(["pkill", "-f", f"flower-superlink.*--port {port}"], check=False)
