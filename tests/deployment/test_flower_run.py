"""`flwr run` for real: Flower's simulation runtime, from a copy of the app, as `scripts/run` starts
it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from discreet.deployment.flower_home import flower_environment, free_port
from discreet.ledger.durable_ledger import DurableLedger
from discreet.run_files.compose import load_asked
from discreet.run_files.run_folder import RunFolder, state_of
from discreet.simulation.in_process import simulate
from discreet.simulation.processes import child_processes
from tests.command import run as main
from tests.scripts.living import (
    LOOPBACK,
    after_rounds,
    check_interrupted,
    intrude,
    listening,
    start,
)

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = [
    "data.num_clients=8",
    "sampling.probability=0.5",
    "model.name=logistic_regression",
    "training.epochs=2",
]
MASKED = ["sampling.kind=everyone", "privacy.accountant=rdp", "privacy.user.too_noisy=warn"]
SHARED_STEP = [
    "privacy.user.enabled=false",
    "privacy.example.enabled=true",
    "privacy.example.aggregation=secure",
    "privacy.example.noise_multiplier=2",
    "training.epochs=1",
    "training.batch_size=200",
]
DEADLINE = 300

slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("engine", "guarantees"),
    [
        ("sequential", []),
        pytest.param("auto", ["model.name='tests.models.test_frozen:statistics'"], marks=slow),
        pytest.param(
            "batched",
            ["privacy.example.enabled=true", "privacy.example.noise_multiplier=1"],
            marks=slow,
        ),
        pytest.param(
            "batched", ["data.normalise=private", "statistics.noise_multiplier=0.1"], marks=slow
        ),
        pytest.param("sequential", [*MASKED, "privacy.user.aggregation=secure"], marks=slow),
        pytest.param("sequential", [*MASKED, *SHARED_STEP], marks=slow),
    ],
)
def test_flowers_runtime_and_the_simulation_give_the_same_numbers(
    engine: str, guarantees: list[str], tmp_path: Path
) -> None:
    words = [*SMALL, *guarantees, "rounds=2", "seed=31481", "privacy.user.noise_multiplier=0.5"]
    assert main([*words, f"output_dir={tmp_path / 'flower'}"]) == 0
    simulate(*load_asked([*words, f"engine={engine}", f"output_dir={tmp_path / 'alone'}"]))
    flower, alone = (RunFolder(tmp_path / name) for name in ("flower", "alone"))
    there, here = flower.load_checkpoint(), alone.load_checkpoint()
    assert torch.allclose(there.params, here.params, atol=1e-5)
    assert there.clip_norm == pytest.approx(here.clip_norm)
    assert there.epsilon_example == pytest.approx(here.epsilon_example)
    columns = ("cohort", "replies", "epsilon_user", "fraction_below")
    for ours, theirs in zip(alone.read_metrics(), flower.read_metrics(), strict=True):
        assert [ours[name] for name in columns] == pytest.approx([theirs[name] for name in columns])


def words_of(pid: int) -> list[str]:
    """The command line of a process."""
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


@slow
def test_two_runs_at_once_end_each_by_itself_and_leave_no_process(tmp_path: Path) -> None:
    """One by Ctrl-C, while the other trains on; that one when its SuperLink is lost. The first one
    is then resumed."""
    first, second = (RunFolder(tmp_path / name) for name in ("first", "second"))
    words = [*SMALL, "privacy.user.noise_multiplier=0.1", "rounds=500"]
    processes = {
        folder: start("", *words, f"output_dir={folder.path}", verb="run")
        for folder in (first, second)
    }
    trees: dict[RunFolder, list[int]] = {}
    try:
        for folder, process in processes.items():
            after_rounds(folder, process)
            trees[folder] = child_processes(process.pid)
            assert {host for host, _ in listening(trees[folder])} <= LOOPBACK
            ((_, port),) = listening(child_processes(process.pid, b"gcs_server"))
            assert "ray.exceptions.AuthenticationError" in intrude(
                f"127.0.0.1:{port}", tmp_path / "intruded"
            )

        processes[first].send_signal(signal.SIGINT)
        _, said = processes[first].communicate(timeout=DEADLINE)
        assert processes[first].returncode == 130
        done = check_interrupted(first, "ended by SIGINT")
        go_on = f"to resume: discreet run resume=true output_dir={first.path}"
        assert said.splitlines()[-1] == f"interrupted after round {done} (ended by SIGINT); {go_on}"
        assert "Traceback" not in said
        assert not {*trees[first]} & {*child_processes(0)}
        after_rounds(second, processes[second], len(second.read_metrics()) + 2)

        (superlink,) = [
            pid for pid in child_processes(processes[second].pid) if "superlink" in words_of(pid)
        ]
        os.kill(superlink, signal.SIGKILL)
        _, said = processes[second].communicate(timeout=DEADLINE)
        assert processes[second].returncode == 1
        lost = f"the SuperLink has ended, with exit code {-signal.SIGKILL}"
        assert (
            f"interrupted after round {check_interrupted(second, lost)} ({lost})"
            in said.splitlines()[-1]
        )
        assert not {*trees[second]} & {*child_processes(0)}
    finally:
        for process in processes.values():
            process.kill()

    done = check_interrupted(first, "ended by SIGINT")
    assert main([*words[:-1], f"output_dir={first.path}", "resume=true", f"rounds={done + 2}"]) == 0
    after = first.load_checkpoint()
    assert after.round == done + 2
    assert DurableLedger(first.ledger_path).spent("user").num_releases - after.round in (0, 1)
    assert state_of(first) == "finished"


@slow
def test_a_plain_flwr_run_works_with_two_nodes(tmp_path: Path) -> None:
    """The command of the README, on the local SuperLink that `flwr run` starts by itself."""
    port = str(free_port())
    environment = flower_environment(tmp_path / "home") | {
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": port
    }
    overrides = " ".join([*SMALL, "rounds=2", f"output_dir={tmp_path / 'run'}"])
    command = ["flwr", "run", ".", "--stream", "--run-config", f'overrides="{overrides}"']
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
        assert "round 2/2" in done.stdout, done.stdout + done.stderr
        assert (tmp_path / "run" / "privacy.json").exists()
    finally:
        subprocess.run(["pkill", "-f", f"flower-superlink.*--port {port}"], check=False)
