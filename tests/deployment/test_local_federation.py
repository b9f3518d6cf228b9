"""The commands that start a whole federation run, small."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from benchmarks import deployment_speed as deployment
from discreet.deployment.local_federation import RUN_SECONDS, main, wait_until
from discreet.federated.durable_ledger import DurableLedger
from discreet.federated.run_folder import RunFolder, state_of
from examples.million import million
from tests.scripts.living import MARK, default_signals, marked


@pytest.mark.slow
def test_a_federation_on_this_machine_keeps_its_run_where_it_was_asked_to(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder(tmp_path / "run")
    assert main(["--nodes", "2", "rounds=1", f"output_dir={run.path}"]) == 0
    assert "round 1/1" in capfd.readouterr().out
    assert state_of(run) == "finished"
    assert (run.path / "privacy.json").exists()
    assert DurableLedger(run.path / "nodes" / "node-0.db").releases()


@pytest.mark.slow
def test_ctrl_c_ends_every_process_of_a_federation_on_this_machine(tmp_path: Path) -> None:
    run, mark = RunFolder(tmp_path / "run"), uuid.uuid4().hex
    command = [
        sys.executable,
        "-m",
        "discreet.deployment.local_federation",
        "--nodes",
        "2",
        "rounds=500",
        f"output_dir={run.path}",
    ]
    process = subprocess.Popen(
        command, env=os.environ | {MARK: mark}, stderr=subprocess.PIPE, text=True, preexec_fn=default_signals
    )
    try:
        wait_until(lambda: run.load_checkpoint() or process.poll() is not None, RUN_SECONDS, "a round is done")
        assert len(marked(mark)) > 8
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=RUN_SECONDS)
    finally:
        process.kill()  # its keeper ends the rest
    assert process.returncode == 130
    assert marked(mark) == []
    assert state_of(run) == "interrupted"
    go_on = f"to go on: python -m discreet.deployment.local_federation --nodes 2 resume=true output_dir={run.path}"
    assert errors.splitlines()[-1].endswith(go_on)


@pytest.mark.slow
def test_the_benchmark_measures_the_floor_and_a_million_parameters(tmp_path: Path) -> None:
    rows = deployment.rows(nodes=1, rounds=1, folder=tmp_path / "federation")
    names = [f"{what}, apps {how}" for how in ("started anew", "ready") for what in ("floor", "ours")]
    assert [(row["what"], row["replies"]) for row in rows] == [(name, 1) for name in names]
    assert all(row["ratio"] == row["seconds"] / rows[0]["seconds"] for row in rows)
    assert all(row[name] > 0 for row in rows for name in ("gate", "link", "app"))


def test_the_model_under_load_has_a_million_parameters() -> None:
    size = sum(parameter.numel() for parameter in million((1, 8, 8), 10).parameters())
    assert 0.999e6 < size <= 1e6
