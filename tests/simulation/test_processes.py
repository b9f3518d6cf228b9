"""Processes end with the one that started them, and a scratch folder with all that was started in its block."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from discreet.deployment.flower_home import wait_until
from discreet.simulation.processes import below
from tests.scripts.living import MARK, marked

SECONDS = 60
# Three that sleep: one plain, one in a session of its own, and one in a session whose parent has ended.
TREE = "sleep 997 & setsid sleep 998 & sh -c 'setsid sleep 999 & exit' ; wait"
STARTER = f"""
import subprocess
from discreet.simulation.processes import scratch_folder, tied

with scratch_folder() as folder:
    (folder / "a").touch()
    subprocess.Popen(tied(["sh", "-c", {TREE!r}]), stdin=subprocess.DEVNULL)
    input()
"""

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc and prctl of Linux")


@pytest.fixture
def mark() -> Iterator[str]:
    """Every process of a test carries it; none outlives the test."""
    mark = uuid.uuid4().hex
    yield mark
    for pid in marked(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def sleepers(mark: str) -> list[int]:
    return marked(mark, program="sleep")


@pytest.mark.parametrize("kill", [False, True])
def test_all_that_came_of_a_scratch_folder_ends_with_its_block_and_with_its_process_even_by_kill_9(
    kill: bool, mark: str, tmp_path: Path
) -> None:
    environment = os.environ | {MARK: mark, "TMPDIR": str(tmp_path)}
    starter = subprocess.Popen([sys.executable, "-c", STARTER], env=environment, stdin=subprocess.PIPE)
    wait_until(lambda: len(sleepers(mark)) == 3, SECONDS, "the tree lives")
    assert len({os.getsid(pid) for pid in sleepers(mark)}) == 3
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    if kill:
        starter.kill()
    starter.communicate(b"\n", timeout=SECONDS)
    wait_until(lambda: marked(mark) == [] and not folder.exists(), SECONDS if kill else 0, "all is gone")


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
