"""Whoever ends a run early finds its files right, one line that goes on with it, and no process left."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from discreet.deployment import interruption
from discreet.deployment.flower_home import wait_until
from discreet.deployment.interruption import resumable
from discreet.deployment.local_federation import RUN_SECONDS
from discreet.protocol.run_lost import RunLostError
from discreet.server.run_folder import RunFolder, RunStatus, only_writer, state_of, write_status
from discreet.settings.compose import load_config
from discreet.settings.settings import described
from tests.scripts.living import MARK, check_interrupted, default_signals, marked

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = [
    "data.num_clients=20",
    "model.name=logistic_regression",
    "training.epochs=1",
    "privacy.user.noise_multiplier=0.1",  # with more, a long run diverges and ends by itself
]
LONG = "rounds=5000"


def start(mark: str, *words: str) -> subprocess.Popen[str]:
    """A simulation with its output in pipes."""
    return subprocess.Popen(
        [sys.executable, "-m", "discreet", "simulate", *words],
        cwd=ROOT,
        env=os.environ | {MARK: mark, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=default_signals,
    )


def after_two_rounds(folder: RunFolder, process: subprocess.Popen[str]) -> None:
    wait_until(
        lambda: len(folder.read_metrics()) >= 2 or process.poll() is not None, RUN_SECONDS, "two rounds are done"
    )
    assert process.poll() is None


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGHUP], ids=["Ctrl-C", "the terminal is lost"])
def test_a_signal_ends_a_simulation_and_its_workers_with_the_line_that_resumes(
    by: signal.Signals, tmp_path: Path
) -> None:
    folder, mark = RunFolder(tmp_path / "run"), uuid.uuid4().hex
    process = start(mark, *SMALL, LONG, f"output_dir={folder.path}")
    after_two_rounds(folder, process)
    process.send_signal(by)
    said, errors = process.communicate(timeout=RUN_SECONDS)
    assert (process.returncode, errors) == (128 + by, "")
    assert marked(mark) == []
    line = (
        f"interrupted after round {check_interrupted(folder, f'ended by {by.name}')} (ended by {by.name}); to go on: "
    )
    assert said.splitlines()[-1] == f"{line}discreet simulate resume=true output_dir={folder.path}"


@pytest.mark.slow
def test_output_that_nobody_reads_ends_the_run_quietly(tmp_path: Path) -> None:
    folder, mark = RunFolder(tmp_path / "run"), uuid.uuid4().hex
    process = start(mark, *SMALL, LONG, f"output_dir={folder.path}")
    assert process.stdout is not None
    assert process.stderr is not None
    while not process.stdout.readline().startswith("round 2/"):
        assert process.poll() is None
    process.stdout.close()
    assert process.wait(RUN_SECONDS) == 128 + signal.SIGPIPE
    assert marked(mark) == []
    done = check_interrupted(folder, "nobody reads the output any more")
    line = f"interrupted after round {done} (nobody reads the output any more); to go on: discreet simulate"
    assert process.stderr.read() == f"{line} resume=true output_dir={folder.path}\n"
    process.stderr.close()


def begun(path: Path) -> RunFolder:
    path.mkdir()
    folder = RunFolder(path)
    folder.write_config(described(load_config([*SMALL, f"output_dir={path}"])))
    write_status(folder, RunStatus("running", 30))
    return folder


def test_a_run_that_is_lost_ends_with_the_reason_and_exit_code_1(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = begun(tmp_path / "a run")
    with pytest.raises(SystemExit) as ended, resumable(folder, "scripts/run"):
        raise RunLostError("the SuperLink has ended")
    assert ended.value.code == 1
    (line,) = caplog.messages
    assert line.startswith("interrupted after round 0 (the SuperLink has ended); to go on: scripts/run resume=true ")
    assert load_config(shlex.split(line.partition("scripts/run ")[2])).output_dir == str(folder.path)
    assert state_of(folder) == "interrupted"


def test_a_run_that_is_finished_or_that_somebody_else_writes_stays_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = begun(tmp_path / "run")
    monkeypatch.setattr(interruption, "LOCK_SECONDS", 0.0)
    with only_writer(folder.path), pytest.raises(SystemExit), resumable(folder, "scripts/run"):
        os.kill(os.getpid(), signal.SIGTERM)
    assert state_of(folder) == "running"
    write_status(folder, RunStatus("finished", 30))
    with pytest.raises(SystemExit), resumable(folder, "scripts/run"):
        os.kill(os.getpid(), signal.SIGTERM)
    assert state_of(folder) == "finished"
