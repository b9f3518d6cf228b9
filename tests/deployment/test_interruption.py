"""Whoever ends a run early finds its files right, one line that goes on with it, and no process left."""

from __future__ import annotations

import fcntl
import os
import pty
import shlex
import signal
import subprocess
import sys
import termios
import uuid
from pathlib import Path

import pytest

from discreet.deployment import interruption
from discreet.deployment.flower_home import wait_until
from discreet.deployment.interruption import resumable
from discreet.deployment.local_federation import RUN_SECONDS
from discreet.server.run_folder import RunFolder, RunStatus, only_writer, read_status, state_of, write_status
from discreet.settings.compose import load_config
from discreet.settings.settings import described
from discreet.simulation.processes import RunLostError
from tests.scripts.living import MARK, check_interrupted, default_signals, marked

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = [
    "data.num_clients=20",
    "model.name=logistic_regression",
    "training.epochs=1",
    "privacy.user.noise_multiplier=0.1",  # with more, a long run diverges and ends by itself
]
LONG = "rounds=5000"


def start(mark: str, *words: str, verb: str = "simulate", terminal: int | None = None) -> subprocess.Popen[str]:
    """A command with its output in pipes, or at a terminal that is its own."""

    def as_at_a_terminal() -> None:
        default_signals()
        if terminal is not None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    return subprocess.Popen(
        [sys.executable, "-m", "discreet", verb, *words],
        cwd=ROOT,
        env=os.environ | {MARK: mark, "OMP_NUM_THREADS": "1"},
        stdin=terminal,
        stdout=subprocess.PIPE if terminal is None else terminal,
        stderr=subprocess.PIPE if terminal is None else terminal,
        text=True,
        start_new_session=True,
        preexec_fn=as_at_a_terminal,
    )


def after_two_rounds(folder: RunFolder, process: subprocess.Popen[str]) -> None:
    wait_until(
        lambda: len(folder.read_metrics()) >= 2 or process.poll() is not None, RUN_SECONDS, "two rounds are done"
    )
    assert process.poll() is None


def test_ctrl_c_ends_a_simulation_and_its_workers_with_the_line_that_resumes(tmp_path: Path) -> None:
    folder, mark = RunFolder(tmp_path / "run"), uuid.uuid4().hex
    process = start(mark, *SMALL, LONG, f"output_dir={folder.path}")
    after_two_rounds(folder, process)
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=RUN_SECONDS)
    assert (process.returncode, errors) == (130, "")
    assert marked(mark) == []
    line = f"interrupted after round {check_interrupted(folder, 'ended by SIGINT')} (ended by SIGINT); to go on: "
    assert said.splitlines()[-1] == f"{line}discreet simulate resume=true output_dir={folder.path}"


def test_the_loss_of_the_terminal_ends_a_simulation_and_its_workers(tmp_path: Path) -> None:
    folder, mark = RunFolder(tmp_path / "run"), uuid.uuid4().hex
    ours, theirs = pty.openpty()
    process = start(mark, *SMALL, LONG, f"output_dir={folder.path}", terminal=theirs)
    os.close(theirs)
    after_two_rounds(folder, process)
    os.close(ours)  # what it writes from now on fails
    assert process.wait(RUN_SECONDS) == 128 + signal.SIGHUP
    assert marked(mark) == []
    check_interrupted(folder, "ended by SIGHUP")


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


@pytest.mark.slow
def test_a_tune_that_is_ended_leaves_no_process_and_chooses_nothing(tmp_path: Path) -> None:
    output, mark = tmp_path / "tuned", uuid.uuid4().hex
    words = ["--trials", "logarithmic", "--mean", "50", "--output", str(output), *SMALL, LONG]
    process = start(mark, *words, "privacy.user.clip.norm=0.1,0.3", "seed=7", verb="tune")
    wait_until(lambda: list(output.glob("trials/*/metrics.csv")), RUN_SECONDS, "a trial trains")
    process.terminate()
    said, errors = process.communicate(timeout=RUN_SECONDS)
    assert (process.returncode, errors) == (143, "")
    assert marked(mark) == []
    last = said.splitlines()[-1]
    assert last.startswith("interrupted (ended by SIGTERM); to go on: discreet tune --resume --output ")
    assert last.endswith("; until then nothing is chosen")
    assert not (output / "chosen").exists()
    (status,) = [read_status(RunFolder(path)) for path in (output / "trials").iterdir()]
    assert status is not None
    assert status.state == "interrupted"


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
