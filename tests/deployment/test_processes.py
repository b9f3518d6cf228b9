"""A keeper ends every process that came of its command. The trees here are made of shells that sleep."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from discreet.deployment.local_federation import wait_until
from discreet.processes import below, kept
from tests.scripts.living import MARK, marked

SECONDS = 60
# Three that sleep: one plain, one in a session of its own, and one in a session whose parent has ended.
TREE = "sleep 997 & setsid sleep 998 & sh -c 'setsid sleep 999 & exit' ; "

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc and prctl of Linux")

Plant = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def mark() -> Iterator[str]:
    """Every process of a test carries it; none outlives the test."""
    mark = uuid.uuid4().hex
    yield mark
    for pid in marked(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def plant(mark: str) -> Plant:
    """Starts the tree below a keeper, with what its root does then; returns when all of it lives."""

    def start(then: str) -> subprocess.Popen[bytes]:
        command = kept(["sh", "-c", TREE + then])
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, env=os.environ | {MARK: mark}, start_new_session=True
        )
        wait_until(lambda: len(sleepers(mark)) == 3, SECONDS, "the tree lives")
        return process

    return start


def sleepers(mark: str) -> list[int]:
    return marked(mark, program="sleep")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_keeper_that_is_asked_to_end_leaves_no_process(number: signal.Signals, plant: Plant, mark: str) -> None:
    keeper = plant("wait")
    sessions = {os.getsid(pid) for pid in sleepers(mark)}
    assert len(sessions) == 3
    keeper.send_signal(number)
    keeper.communicate(timeout=SECONDS)
    assert keeper.returncode == 128 + number
    assert marked(mark) == []


def test_a_keeper_ends_with_whoever_started_it_even_by_kill_9(mark: str) -> None:
    command = f"kept(['sh', '-c', {TREE + 'wait'!r}])"
    code = f"import subprocess; from discreet.processes import kept; subprocess.run({command})"
    starter = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {MARK: mark})
    wait_until(lambda: len(sleepers(mark)) == 3, SECONDS, "the tree lives")
    starter.kill()
    starter.wait(SECONDS)
    wait_until(lambda: marked(mark) == [], SECONDS, "the tree has ended")


def test_kill_9_of_a_process_takes_its_command_and_its_folder_along(mark: str, tmp_path: Path) -> None:
    code = (
        "import subprocess; from discreet.processes import scratch_folder, tied\n"
        "with scratch_folder() as folder:\n    (folder / 'a').touch()\n    subprocess.run(tied(['sleep', '996']))"
    )
    environment = os.environ | {MARK: mark, "TMPDIR": str(tmp_path)}
    starter = subprocess.Popen([sys.executable, "-c", code], env=environment)
    wait_until(lambda: len(sleepers(mark)) == 1, SECONDS, "the command runs")
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    starter.kill()
    starter.wait(SECONDS)
    wait_until(lambda: marked(mark) == [] and not folder.exists(), SECONDS, "all is gone")


def test_what_has_ended_is_not_below(mark: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", "import os; os.fork() or os._exit(0); input()"], stdin=-1)
    try:
        wait_until(lambda: not below(parent.pid), SECONDS, "the child is a zombie")
        assert parent.poll() is None
    finally:
        parent.communicate(b"\n")


def test_a_process_whose_first_thread_has_ended_lives_as_long_as_another_one() -> None:
    code = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(900,)).start(); "
    parent = subprocess.Popen([sys.executable, "-c", code + "ctypes.CDLL(None).pthread_exit(None)"])
    try:
        wait_until(
            lambda: "(zombie)" in Path(f"/proc/{parent.pid}/status").read_text(), SECONDS, "the thread has ended"
        )
        assert parent.pid in below(os.getpid())
    finally:
        parent.kill()
        parent.wait(SECONDS)
    assert parent.pid not in below(os.getpid())
