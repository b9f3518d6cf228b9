"""A block whose keeper, or everything around it, is killed by kill -9: it ends, the guard says that
its sandbox has failed, and nothing of a patient stays."""

from __future__ import annotations

import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from discreet.guard.scratch_home import NAME, PLACE
from discreet.simulation.processes import child_processes
from tests.guard.test_attacks import ENCLOSURES, Enclosed, can_not
from tests.guard.unprivileged import NOBODY

# Users of these tests alone, whose folders are counted.
USERS = {"kernel": NOBODY - 3, "bubblewrap": NOBODY - 4, "landlock": NOBODY - 5}
SLOT = 8.0
WAIT_SECONDS = 60.0


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def words_of(pid: int) -> list[bytes]:
    with suppress(OSError):  # it has ended
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return []


def status_of(pid: int, field: str) -> str:
    """A field of a process in /proc; nothing if it has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:\t"):
                return line.split("\t")[1]
    return ""


def ends(process: int) -> bool:
    """True if a process that is open ends."""
    return bool(select.select([process], [], [], WAIT_SECONDS)[0])


class Stays:
    """A guard in another process, whose block stays as long as it can."""

    def __init__(self, enclosure: str, folder: Path) -> None:
        self.folder = folder
        self.user = USERS[enclosure] if os.geteuid() == 0 else os.geteuid()
        os.chown(folder, self.user, self.user)
        self.enclosed = Enclosed(enclosure, folder, user=self.user)
        self.guard = self.enclosed.process.pid
        self.enclosed.ask("clings", blocks=[0, 1], slot=SLOT)
        wait_for(lambda: len(self.sandbox()) > 2)
        if enclosure != "kernel":  # whose processes are hidden
            wait_for(lambda: len(self.named()) == 2)
        _, self.keeper, first, *others = self.sandbox()
        rest = {*others, *self.named()} - {first}
        self.block = [os.pidfd_open(pid) for pid in (first, *rest)]

    def sandbox(self) -> list[int]:
        """What blocks are forked from, the keeper of a block, and then the block."""
        below = child_processes(self.guard)
        named = [pid for pid in below if words_of(pid)[2:3] == [b"discreet.guard.zygote"]]
        parents = {pid: status_of(pid, "PPid") for pid in below}
        chain = [pid for pid in named if int(parents[pid] or 0) not in named]
        while chain and (inner := [pid for pid in below if parents[pid] == str(chain[-1])]):
            chain.append(inner[0])
        return chain

    def named(self) -> list[int]:
        """The processes of the block that have named themselves."""
        below = child_processes(self.guard)
        return [pid for pid in below if status_of(pid, "Name") == "leftover"]

    def has_ended(self) -> bool:
        """True if all processes of the block end."""
        return all(ends(each) for each in self.block)

    def homes(self) -> list[Path]:
        """The folders of this user's sandboxes."""
        return [each for each in PLACE.glob(f"{NAME}*") if each.lstat().st_uid == self.user]

    def close(self) -> None:
        os.kill(self.guard, signal.SIGCONT)
        for each in self.block:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(each, signal.SIGKILL)
            os.close(each)
        self.enclosed.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="guard-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def stays(request: pytest.FixtureRequest, folder: Path) -> Iterator[Stays]:
    if reason := can_not(request.param):
        pytest.skip(reason)
    made = Stays(request.param, folder)
    yield made
    made.close()


@pytest.mark.processes
@pytest.mark.parametrize("stays", ENCLOSURES, indirect=True)
def test_a_block_ends_with_its_keeper_and_the_guard_takes_it_for_no_end(stays: Stays) -> None:
    os.kill(stays.guard, signal.SIGSTOP)  # it is not the guard that ends the block
    os.kill(stays.keeper, signal.SIGKILL)
    assert ends(stays.block[0])
    os.kill(stays.guard, signal.SIGCONT)
    said = stays.enclosed.line()
    assert said == {"error": "SandboxError: the keeper of a block has ended before its block"}
    assert stays.has_ended()
    assert stays.sandbox() == []
    assert stays.homes() == []


@pytest.mark.processes
@pytest.mark.parametrize("stays", ["landlock"], indirect=True)
def test_a_guard_removes_what_one_before_it_has_left_when_all_of_it_was_killed(
    stays: Stays, folder: Path
) -> None:
    (home,) = stays.homes()
    (rows,) = home.glob("*/data/rows.csv")
    for pid in (stays.guard, *stays.sandbox()):
        with suppress(ProcessLookupError):  # it has ended with its parent
            os.kill(pid, signal.SIGKILL)
    assert rows.exists()
    later = Enclosed("landlock", folder / "later", user=stays.user)
    assert not home.exists()
    third = Enclosed("landlock", folder / "third", user=stays.user)
    assert len(stays.homes()) == 2  # that of a guard which runs stays
    later.close()
    third.close()
    assert stays.homes() == []
