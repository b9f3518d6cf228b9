"""Workers give replies in order, from memory that they share; no process outlives the one that
started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from discreet.deployment.flower_home import wait_until
from discreet.mechanisms.sums import PartialReply
from discreet.simulation.processes import child_processes
from discreet.simulation.workers import LocalWorkers, can_fork
from tests.scripts.living import MARK, marked

ROOT = Path(__file__).resolve().parent.parent.parent
START = torch.tensor([1.0, 2.0])


def scaled(params: Tensor, work: tuple[int, float], *, offset: float = 0.0) -> PartialReply:
    rows, scale = work
    if scale < 0:
        raise ValueError(f"scale must not be negative, not {scale}")
    values = (params * scale + offset).double() if scale % 2 else (params * scale).long()
    return PartialReply(values, -rows, rows, 0.5, None, epsilon_example=scale)


@pytest.fixture
def each() -> Iterator[LocalWorkers]:
    if not can_fork():
        pytest.skip("needs Linux")
    made = LocalWorkers(partial(scaled, offset=0.5), count=2, num_params=2, sum_length=2)
    yield made
    made.close()


def test_replies_come_in_the_order_of_the_work(each: LocalWorkers) -> None:
    works = [(3, 1.0), (1, 2.0), (2, 3.0), (3, 4.0), (1, 5.0), (2, 0.0)]
    for params in (START, 10 * START):
        for (rows, scale), replies in zip(works, each.replies(params, works), strict=True):
            expected = (params * scale + 0.5).double() if scale % 2 else (params * scale).long()
            assert replies.values.dtype == expected.dtype
            assert torch.equal(replies.values, expected)
            assert (replies.below, replies.replies, replies.epsilon_example) == (-rows, rows, scale)


def test_what_fails_is_raised_and_the_next_round_starts_anew(each: LocalWorkers) -> None:
    for _ in range(4):  # more failures than there is room for results
        with pytest.raises(ValueError, match="scale must not"):
            list(each.replies(START, [(1, 1.0), (1, -1.0), (1, 2.0), (1, 3.0)]))
    replies = each.replies(START, [(1, 7.0), (1, 8.0)])
    assert [reply.epsilon_example for reply in replies] == [7.0, 8.0]


@pytest.mark.skipif(not can_fork(), reason="needs Linux")
def test_a_killed_worker_is_said() -> None:
    each = LocalWorkers(_killed, count=1, num_params=2, sum_length=2)
    with pytest.raises(RuntimeError, match="a worker process of the simulation was killed"):
        next(each.replies(START, [0]))
    each.close()


def _killed(params: Tensor, work: int) -> PartialReply:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


ORPHANS = """
import os, sys, torch
from discreet.mechanisms.sums import PartialReply
from discreet.simulation.workers import LocalWorkers

def tell(params, work):
    return PartialReply(torch.tensor([os.getpid() - os.getppid()]), 1, 1, 1.0, None)

each = LocalWorkers(tell, count=1, num_params=1, sum_length=1)
print(os.getpid() + int(next(each.replies(torch.zeros(1), [0])).values), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not can_fork(), reason="needs Linux")
def test_workers_end_with_a_parent_that_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ORPHANS],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        worker = Path("/proc", parent.stdout.readline().strip())
        assert worker.is_dir()
        parent.kill()
        deadline = time.monotonic() + 30
        while _runs(worker):
            assert time.monotonic() < deadline, "the worker outlives its parent"


def _runs(process: Path) -> bool:
    try:
        return process.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


SECONDS = 60
# Three that sleep: one plain, one in a session of its own, and one in a session whose parent has
# ended.
TREE = "sleep 997 & setsid sleep 998 & sh -c 'setsid sleep 999 & exit' ; wait"
STARTER = f"""
import subprocess
from discreet.simulation.processes import scratch_folder, tied

with scratch_folder() as folder:
    (folder / "a").touch()
    subprocess.Popen(tied(["sh", "-c", {TREE!r}]), stdin=subprocess.DEVNULL)
    input()
"""

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="needs /proc and prctl of Linux"
)


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
def test_a_scratch_folder_is_erased_with_its_block_and_its_process_even_by_kill_9(
    kill: bool, mark: str, tmp_path: Path
) -> None:
    environment = os.environ | {MARK: mark, "TMPDIR": str(tmp_path)}
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER], env=environment, stdin=subprocess.PIPE
    )
    wait_until(lambda: len(sleepers(mark)) == 3, SECONDS, "the tree lives")
    assert len({os.getsid(pid) for pid in sleepers(mark)}) == 3
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    if kill:
        starter.kill()
    starter.communicate(b"\n", timeout=SECONDS)
    wait_until(
        lambda: marked(mark) == [] and not folder.exists(), SECONDS if kill else 0, "all is gone"
    )


def test_a_process_whose_first_thread_has_ended_lives_as_long_as_another_one() -> None:
    code = (
        "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(900,)).start(); "
    )
    parent = subprocess.Popen([sys.executable, "-c", code + "ctypes.CDLL(None).pthread_exit(None)"])
    try:
        wait_until(
            lambda: "(zombie)" in Path(f"/proc/{parent.pid}/status").read_text(),
            SECONDS,
            "the thread has ended",
        )
        assert parent.pid in child_processes(os.getpid())
    finally:
        parent.kill()
        parent.wait(SECONDS)
    assert parent.pid not in child_processes(os.getpid())
