"""Whoever ends a run early finds its files right, one line that goes on with it, and no process
left."""

from __future__ import annotations

import os
import pty
import shlex
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from discreet.cli.main import main
from discreet.deployment import interruption
from discreet.deployment.flower_home import wait_until
from discreet.deployment.interruption import folder_in, not_begun, resumable
from discreet.deployment.local_federation import Federation, from_here
from discreet.ledger.durable_ledger import DurableLedger
from discreet.run_files.compose import load_asked, load_config
from discreet.run_files.opening import only_writer
from discreet.run_files.run_folder import CONFIG, RunFolder, RunStatus, state_of, write_status
from discreet.server import training_run
from discreet.simulation.processes import RunLostError
from tests.deployment.ends import RUN_SECONDS
from tests.scripts.living import (
    LONG,
    MARK,
    SMALL,
    after_rounds,
    check_interrupted,
    default_signals,
    marked,
    start,
)

pytestmark = pytest.mark.processes


def test_ctrl_c_ends_a_simulation_and_its_workers_with_the_line_that_resumes(
    tmp_path: Path,
) -> None:
    folder, mark = RunFolder(tmp_path / "run"), uuid.uuid4().hex
    process = start(mark, *SMALL, LONG, f"output_dir={folder.path}")
    after_rounds(folder, process)
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=RUN_SECONDS)
    assert (process.returncode, errors) == (130, "")
    assert marked(mark) == []
    line = (
        f"interrupted after round {check_interrupted(folder, 'ended by SIGINT')} (ended by "
        "SIGINT); to resume: "
    )
    assert said.splitlines()[-1] == f"{line}discreet simulate resume=true output_dir={folder.path}"


def test_the_loss_of_the_terminal_ends_a_simulation_and_its_workers(tmp_path: Path) -> None:
    folder, mark = RunFolder(tmp_path / "run"), uuid.uuid4().hex
    ours, theirs = pty.openpty()
    process = start(mark, *SMALL, LONG, f"output_dir={folder.path}", terminal=theirs)
    os.close(theirs)
    after_rounds(folder, process)
    os.close(ours)  # what it writes from now on fails
    assert process.wait(RUN_SECONDS) == 128 + signal.SIGHUP
    assert marked(mark) == []
    check_interrupted(folder, "ended by SIGHUP")


@pytest.mark.slow
def test_output_that_nobody_reads_ends_the_run_quietly(tmp_path: Path) -> None:
    folder, mark = RunFolder(tmp_path / "run"), uuid.uuid4().hex
    process = start(mark, *SMALL, LONG, f"output_dir={folder.path}")
    while not process.stdout.readline().startswith("round 2/"):
        assert process.poll() is None
    process.stdout.close()
    assert process.wait(RUN_SECONDS) == 128 + signal.SIGPIPE
    assert marked(mark) == []
    done = check_interrupted(folder, "the output is no longer read")
    line = (
        f"interrupted after round {done} (the output is no longer read); to resume: discreet "
        "simulate"
    )
    assert process.stderr.read() == f"{line} resume=true output_dir={folder.path}\n"
    process.stderr.close()


def begun(path: Path) -> RunFolder:
    path.mkdir()
    folder = RunFolder(path)
    folder.write_config(load_config(SMALL))
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
    assert line.startswith(
        "interrupted after round 0 (the SuperLink has ended); to resume: scripts/run resume=true "
    )
    _, call = load_asked(shlex.split(line.partition("scripts/run ")[2]))
    assert call.output_dir == str(folder.path)
    assert state_of(folder) == "interrupted"


def test_a_run_that_an_error_ends_is_not_left_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run")
    kept = RunFolder.append_metrics

    def fails(self: RunFolder, row: dict[str, object]) -> None:
        if row["round"] == 2:
            raise TypeError("a fault of one's own")
        kept(self, row)

    monkeypatch.setattr(RunFolder, "append_metrics", fails)
    with pytest.raises(TypeError, match="of one's own"):
        main(["simulate", *SMALL, "rounds=3", f"output_dir={folder.path}"])
    check_interrupted(folder, "a fault of one's own")


@pytest.fixture
def heard() -> Iterator[None]:
    """A process that hears signals, also where the tests run in the background."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize(
    ("number", "place"),
    [
        (signal.SIGINT, (DurableLedger, "charge")),
        (signal.SIGINT, (RunFolder, "append_metrics")),
        (signal.SIGTERM, (RunFolder, "save_checkpoint")),
    ],
)
def test_a_round_that_is_paid_is_kept_before_a_signal_ends_the_run(
    number: signal.Signals,
    place: tuple[type, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = RunFolder(tmp_path / "run")
    done = getattr(*place)

    def asked_to_end(*given: object, **named: object) -> object:
        result = done(*given, **named)
        if paid(folder) == 2:
            os.kill(os.getpid(), number)
        return result

    words = [*SMALL, "rounds=3", f"output_dir={folder.path}"]
    with monkeypatch.context() as patched:
        patched.setattr(*place, asked_to_end)
        with pytest.raises(SystemExit) as ended:
            main(["simulate", *words])
    assert ended.value.code == 128 + number
    assert f"interrupted after round 2 (ended by {number.name})" in capsys.readouterr().out
    assert check_interrupted(folder, f"ended by {number.name}") == 2
    assert main(["simulate", "resume=true", f"output_dir={folder.path}"]) == 0
    assert paid(folder) == 3


def paid(folder: RunFolder) -> int:
    """The rounds on a run's ledger."""
    return DurableLedger(folder.ledger_path).spent("user").num_releases


def test_a_round_is_kept_before_its_line_meets_a_reader_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run")

    def said(row: dict[str, object], *, rounds: int) -> str:
        raise BrokenPipeError

    monkeypatch.setattr(training_run, "round_line", said)
    with pytest.raises(SystemExit):
        main(["simulate", *SMALL, "rounds=3", f"output_dir={folder.path}"])
    state = folder.load_checkpoint()
    assert state is not None
    assert state.round == 1


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


def test_a_node_that_ends_at_its_start_is_not_waited_for(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    federation.start(
        "node-0", [sys.executable, "-c", "print('first'); print('no room'); raise SystemExit(3)"]
    )
    with pytest.raises(
        RunLostError, match="node-0 has ended with 3 before it was connected; it said last: no room"
    ):
        federation.wait_for_nodes(["node-0"])


@pytest.mark.slow
def test_ctrl_c_ends_every_process_of_a_federation_on_this_machine(tmp_path: Path) -> None:
    run, mark = RunFolder(tmp_path / "run"), uuid.uuid4().hex
    words = ["--nodes", "2", "rounds=500", f"output_dir={run.path}"]
    command = [sys.executable, "-m", "discreet.deployment.local_federation", *words]
    process = subprocess.Popen(
        command,
        env=os.environ | {MARK: mark},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=default_signals,
    )
    try:
        wait_until(
            lambda: run.load_checkpoint() or process.poll() is not None,
            RUN_SECONDS,
            "a round is done",
        )
        assert len(marked(mark)) > 8
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=RUN_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 130
    assert marked(mark) == []
    assert state_of(run) == "interrupted"
    go_on = (
        "to resume: python -m discreet.deployment.local_federation --nodes 2 resume=true "
        f"output_dir={run.path}"
    )
    assert errors.splitlines()[-1].endswith(go_on)


def test_paths_of_a_federations_settings_are_those_of_the_folder_it_was_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["rounds=3", "privacy.user.account='the people.db'", "data.path=null", "data.path=own"]
    assert [from_here(word) for word in given] == [
        "rounds=3",
        f'privacy.user.account="{tmp_path}/the people.db"',
        "data.path=null",
        f"data.path={tmp_path}/own",
    ]


def test_that_nothing_was_spent_is_said_only_where_there_is_no_ledger(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run")
    assert folder_in(["rounds=3"]) is None
    assert folder_in(["output_dir=other", f"output_dir='{folder.path}'"]) == folder
    assert "nothing was spent, and the same command starts it again" in not_begun(
        "ended by SIGINT", folder
    )
    DurableLedger.create(folder.ledger_path)
    assert not_begun("ended by SIGINT", folder).endswith(
        f"what was spent before is recorded in {folder.path}"
    )
    (folder.path / CONFIG).unlink()
    with pytest.raises(SystemExit), resumable(folder, "scripts/run"):
        os.kill(os.getpid(), signal.SIGTERM)
