"""A run on this machine whose processes die is known to be lost within ten seconds, and says what
it has lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from discreet.deployment.flower_home import wait_until
from discreet.deployment.run_watch import APPS, NOT_SHOWN, RunWatch, follow
from discreet.run_files.run_folder import RunFolder, RunStatus, write_status
from discreet.simulation.processes import RunLostError, child_processes

SLEEP = [sys.executable, "-c", "import time; time.sleep(300)"]
SOON = 10.0


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes = [subprocess.Popen(SLEEP) for _ in range(5)]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("which", "name"), [(1, "the SuperLink"), (2, "the node proxy")])
def test_a_run_ends_when_a_process_dies_that_it_can_not_do_without(
    started: list[subprocess.Popen[bytes]], which: int, name: str, tmp_path: Path
) -> None:
    flwr, superlink, proxy, *_ = started
    (tmp_path / "run.log").touch()
    watch = RunWatch(RunFolder(tmp_path), superlink, proxy)
    watch.check()
    started[which].kill()
    with pytest.raises(RunLostError, match=f"^{name} has ended.* -9$"):
        follow(flwr, tmp_path / "run.log", watch)


def test_a_log_is_shown_whole_but_for_warnings_that_are_about_no_run(
    started: list[subprocess.Popen[bytes]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "run.log"
    hidden = [f"WARNING:  {words} from 10 to 2." for words in NOT_SHOWN]
    lines = ["one", *hidden, "\x1b[92mINFO \x1b[0m:      ", "INFO :  two", "the end"]
    printing = f"import time\nfor line in {lines}: print(line, flush=True); time.sleep(0.3)"
    with log.open("w") as file:
        flwr = subprocess.Popen([sys.executable, "-c", printing], stdout=file)
    follow(flwr, log, RunWatch(RunFolder(tmp_path), started[0]))
    assert capsys.readouterr().out == "one\nINFO :  two\nthe end\n"


def test_a_node_that_dies_is_said_once_and_the_last_one_ends_the_run(
    started: list[subprocess.Popen[bytes]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, superlink, clients, one, other = started
    watch = RunWatch(
        RunFolder(tmp_path), superlink, None, {"node-0": one, "node-1": other}, {"clients": clients}
    )
    for process, name in ((clients, "clients"), (one, "node-0")):
        process.kill()
        process.wait()
        watch.check()
        watch.check()
        assert (
            caplog.text.count(f"{name} has ended, with exit code -9: the run continues without it")
            == 1
        )
    other.kill()
    other.wait()
    with pytest.raises(RunLostError, match=r"^all nodes have ended$"):
        watch.check()


def kill_apps(superlink: subprocess.Popen[bytes]) -> bool:
    """Kills the ServerApps below a SuperLink; True if none is left. A kill takes a moment, and a
    shell that has just split off bears the name of its app for a moment too."""
    for pid in child_processes(superlink.pid, APPS):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return not child_processes(superlink.pid, APPS)


@pytest.mark.parametrize("program", APPS)
def test_a_server_app_that_dies_is_known_soon_unless_its_run_is_over(
    program: bytes, tmp_path: Path
) -> None:
    app = tmp_path / program.decode()
    app.write_text("#!/bin/sh\nsleep 300 & wait\n")
    app.chmod(0o700)
    superlink, now = (
        subprocess.Popen(["sh", "-c", f"{app} & sleep 300"], start_new_session=True),
        [100.0],
    )
    try:
        wait_until(lambda: child_processes(superlink.pid, APPS), SOON, "the ServerApp runs")
        watch = RunWatch(RunFolder(tmp_path), superlink, clock=lambda: now[0])
        watch.check()
        wait_until(lambda: kill_apps(superlink), SOON, "the ServerApp is gone")
        now[0] += SOON - 2
        write_status(watch.run, RunStatus("finished", 3))
        watch.check()
        write_status(watch.run, RunStatus("running", 3))
        now[0] += 1
        with pytest.raises(RunLostError, match=r"^the ServerApp ended without an error message$"):
            watch.check()
    finally:
        os.killpg(superlink.pid, signal.SIGKILL)
        superlink.wait()
