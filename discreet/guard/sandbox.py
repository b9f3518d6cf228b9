"""The guard's side of the sandbox: it runs an app once for each block, and returns one vector or
nothing.

Each block starts at a moment that was fixed beforehand, and is ended at another. What it has given
by the end of its slot counts, and nothing else of it. If it is still there when the next one would
start, that one waits, a whole multiple of the time and however long it takes, and then has as many
seconds as any other: so no block decides whether another counts. Its output and state are kept
after the last block has ended.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from discreet.guard.alerts import LATE, Alerts
from discreet.guard.block_release import Vector
from discreet.guard.block_task import ALONE, DEADLINE, IMAGE, MOST_STATE, ROOT, SPACES, BlockTask
from discreet.guard.enclosure import OTHER_MB
from discreet.guard.guard_policy import KERNEL, LANDLOCK, GuardPolicy
from discreet.guard.memory_groups import ADDED_UP, COUNTED, MemoryGroup, MemoryGroups
from discreet.guard.scratch_home import ScratchHome, remove_left
from discreet.settings.rules import ConfigError

logger = logging.getLogger("discreet.guard")

NO_ROOT = "the guard must not run as root, whom limits do not bind: start it as another user"
# Discreet itself. run_files/places.py has it too, and all that finds a project.
PACKAGE = Path(__file__).resolve().parents[1]
START_SECONDS = 300.0
END_SECONDS = 30.0
MOST_STATES = 1 << 29  # of all blocks' together
MOST_LOG = 1 << 16  # bytes of what a block prints: the rest is read and dropped
PIECE = 1 << 20
EXCEEDED = b"\nThe guard has ended this block: it used more than limits.memory-mb and disk-mb.\n"
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache")
EMPTY = [word for path in ("/dev", "/proc", "/tmp") for word in ("--dir", f"{ROOT}{path}")]
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "FLWR_HOME": "/tmp/flwr",
    "USER": "block",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
    "LANG": "C.UTF-8",
}


class SandboxError(RuntimeError):
    """The sandbox can't be started, or has ended. Nothing is released."""


@dataclass(frozen=True)
class BlockInput:
    """One block's part of a round: its number, an open file with its archive, and the state that it
    kept."""

    number: int
    archive: int
    state: bytes


@dataclass(frozen=True)
class BlockResult:
    """The result of a block: its vector (size,) and its state, or None if it failed; and its
    output."""

    number: int
    vector: Vector | None
    state: bytes
    log: bytes


@dataclass
class _Running:
    """A running block: the guard's ends of its pipes, the group that counts its memory, and the
    bytes received so far. `told`: its keeper has said that the block has ended."""

    number: int
    out: int
    log: int
    done: int
    group: MemoryGroup | None
    said: bytearray = field(default_factory=bytearray)
    logged: bytearray = field(default_factory=bytearray)
    told: bool = False

    def end(self) -> None:
        """Takes away what a block that has ended leaves with the guard."""
        os.close(self.done)
        if self.group is None:
            return
        if self.group.was_exceeded():
            self.logged += EXCEEDED
        self.group.remove()


class Sandbox:
    """A process in bubblewrap, or one whose blocks Landlock encloses one by one. Blocks are forked
    from it."""

    def __init__(self, policy: GuardPolicy) -> None:
        """Starts the sandbox and waits until it has imported Flower and PyTorch. SandboxError: it
        can't be started."""
        if os.geteuid() == 0:
            raise ConfigError(NO_ROOT)
        self.policy = policy
        self.alerts = Alerts(policy.alert)
        remove_left()
        self.groups = MemoryGroups.delegated()  # before a process is started that would be in it
        self.home: ScratchHome | None = None
        if policy.enclosure == LANDLOCK:
            self.home = ScratchHome.new()
        self.control, theirs = socket.socketpair()
        with tempfile.TemporaryFile() as said:
            with theirs:
                self.process = self._started(theirs.fileno(), said.fileno())
            self.control.settimeout(START_SECONDS)
            if self.control.recv(1) != b"\1":
                self.close()
                said.seek(0)
                last = said.read().decode(errors="replace").strip().splitlines()[-1:]
                raise SandboxError(f"the sandbox did not start: {' '.join(last)}")

    def _started(self, control: int, said: int) -> subprocess.Popen[bytes]:
        command = sandbox_command(self.policy, control, self.home)
        passed = [control]
        if self.home is not None:
            passed.append(self.home.lock)
        # All that blocks get of the environment: bubblewrap hands it on.
        environment = {**ENVIRONMENT, "PYTHONPATH": str(PACKAGE.parent)}
        try:
            return subprocess.Popen(
                command, env=environment, pass_fds=passed, stdin=subprocess.DEVNULL, stdout=said,
                stderr=said,
            )  # fmt: skip
        except OSError as error:
            raise SandboxError(f"{command[0]} can't be started: {error.strerror}") from error

    def counting(self) -> str:
        """How the memory of a block is counted, in words."""
        if self.groups is None:
            return ADDED_UP
        return COUNTED

    def close(self) -> None:
        """Ends the sandbox and all processes in it."""
        self.control.close()  # at which the first of them ends the others, and then itself
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.home is not None:
            self.home.leave()
            self.home = None

    def run(self, task: BlockTask, blocks: Sequence[BlockInput]) -> Iterator[BlockResult]:
        """Runs a task on blocks, in order, and yields the result of each, while the next ones start
        in time. SandboxError: the sandbox or the keeper of a block has ended. Then all processes
        in the sandbox end."""
        try:
            yield from self._run(task, blocks)
        except SandboxError:
            self.close()
            raise

    def _run(self, task: BlockTask, blocks: Sequence[BlockInput]) -> Iterator[BlockResult]:
        shared = _sealed(task.packed())
        side_by_side = self.policy.at_once
        starts = time.monotonic()
        running: list[_Running] = []
        ending: list[_Running] = []
        try:
            for first in range(0, len(blocks), side_by_side):
                starts = self._free_slot(ending, starts)
                before = running
                running = []
                for block in blocks[first : first + side_by_side]:
                    ends = starts + self.policy.block_seconds
                    running.append(self._start(shared, block, ends, place=len(running)))
                    ending.append(running[-1])
                for each in before:
                    yield self._result(each, task)
                starts += self.policy.slot_seconds
                self._read(running, task, until=starts)
            self._wait_for(ending)
            _end_all(ending)
            for each in running:
                yield self._result(each, task)
        finally:
            os.close(shared)
            _end_all(ending)

    def _free_slot(self, ending: list[_Running], starts: float) -> float:
        """Sleeps until the next blocks may start: at `starts`, or at the first of the slots that
        follow before which all earlier blocks have ended."""
        time.sleep(max(0.0, starts - time.monotonic()))
        if _still_there(ending, 0.0):
            self._wait_for(ending)
            seconds = self.policy.slot_seconds
            longer = math.ceil((time.monotonic() - starts) / seconds)
            logger.warning("a block has ended late: its slot takes %d times as long", 1 + longer)
            starts += longer * seconds
            time.sleep(max(0.0, starts - time.monotonic()))
        _end_all(ending)
        return starts

    def _wait_for(self, ending: Sequence[_Running]) -> None:
        """Waits until the keepers of all blocks have ended, and tells the operators of a block that
        takes long. To give up would let it decide whether the site answers. SandboxError: a keeper
        has ended before its block."""
        while _still_there(ending, END_SECONDS):
            logger.error("a block could not be ended for %g s: the guard waits on", END_SECONDS)
            self.alerts.call(LATE)

    def _start(self, task: int, block: BlockInput, ends: float, *, place: int) -> _Running:
        state = _sealed(block.state)
        out, out_end = os.pipe()
        log, log_end = os.pipe()
        done, done_end = os.pipe()
        group, entry = self._group(place)
        given = [task, block.archive, state, out_end, log_end, done_end, entry]
        try:
            socket.send_fds(self.control, [DEADLINE.pack(ends)], given)
        except OSError as error:
            raise SandboxError("the sandbox has ended") from error
        finally:
            for descriptor in given[2:]:
                os.close(descriptor)
        return _Running(block.number, out, log, done, group)

    def _group(self, place: int) -> tuple[MemoryGroup | None, int]:
        """The group of a block, if groups can be had here, and the open file that leads into it."""
        if self.groups is None:
            return None, os.open(os.devnull, os.O_WRONLY)
        limits = self.policy.limits
        megabytes = limits.memory_mb + limits.disk_mb
        if self.policy.enclosure == KERNEL:
            megabytes += OTHER_MB
        return self.groups.new(place, megabytes)

    def _read(self, running: Sequence[_Running], task: BlockTask, *, until: float) -> None:
        """Reads the pipes of blocks until all have ended or the slot is over."""
        most = 4 * task.size + most_state(self.policy.blocks.count) + 1
        open_pipes = {each.out: (each.said, most) for each in running}
        open_pipes |= {each.log: (each.logged, MOST_LOG) for each in running}
        while open_pipes and (left := until - time.monotonic()) > 0:
            ready, _, _ = select.select(list(open_pipes), [], [], left)
            for pipe in ready:
                kept, room = open_pipes[pipe]
                piece = os.read(pipe, PIECE)
                kept += piece[: max(0, room - len(kept))]
                if not piece:
                    del open_pipes[pipe]
        for each in running:
            os.close(each.out)
            os.close(each.log)

    def _result(self, block: _Running, task: BlockTask) -> BlockResult:
        size = 4 * task.size
        said = bytes(block.said)
        log = bytes(block.logged)
        if not size <= len(said) <= size + most_state(self.policy.blocks.count):
            return BlockResult(block.number, None, b"", log)
        vector = np.frombuffer(said[:size], np.float32)
        return BlockResult(block.number, vector, said[size:], log)


def most_state(blocks: int) -> int:
    """The bytes that each of so many blocks may keep, a public number."""
    return min(MOST_STATE, MOST_STATES // blocks)


def sandbox_command(
    policy: GuardPolicy, control: int, home: ScratchHome | None = None
) -> list[str]:
    """The command line of the sandbox. `home`: for Landlock."""
    python = [sys.executable, "-m", "discreet.guard.zygote", str(control)]
    readable = readable_places()
    if home is not None:
        return [*python, str(home.folder), *readable]
    binds = _binds(readable)
    if policy.enclosure == KERNEL:
        binds += [*_binds(readable, ROOT), *EMPTY, "--tmpfs", ROOT + IMAGE]
    return [
        "bwrap",
        "--unshare-all",
        "--die-with-parent",
        "--new-session",
        "--cap-drop",
        "ALL",
        "--uid",
        "1000",
        "--gid",
        "1000",
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--tmpfs",
        "/tmp",
        *binds,
        "--remount-ro",
        "/dev",
        "--remount-ro",
        "/",
        "--chdir",
        "/",
        "--",
        *python,
        ALONE if policy.enclosure == KERNEL else SPACES,
    ]


def _binds(paths: Sequence[str], below: str = "") -> list[str]:
    """Words that let a sandbox read some paths, in its root or below a folder."""
    return [word for path in paths for word in ("--ro-bind", path, below + path)]


def readable_places() -> list[str]:
    """The paths that a block may read: the system's programs, Python, its packages and Discreet;
    none of the site's data."""
    own = [sys.base_prefix, sys.prefix, str(PACKAGE)]
    return [path for path in dict.fromkeys((*SYSTEM, *own)) if os.path.exists(path)]


def _sealed(content: bytes) -> int:
    """A file in memory that can't be written any more."""
    descriptor = os.memfd_create("block", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _end_all(ending: list[_Running]) -> None:
    while ending:
        ending.pop().end()


def _still_there(ending: Sequence[_Running], seconds: float) -> bool:
    """True if the keeper of a block has not ended within some seconds. SandboxError: one has ended
    before it could say that its block had."""
    until = time.monotonic() + seconds
    waiting = {each.done: each for each in ending}
    while waiting:
        ready, _, _ = select.select(list(waiting), [], [], max(0.0, until - time.monotonic()))
        if not ready:
            return True
        for done in ready:
            if os.read(done, 1):
                waiting[done].told = True
            elif waiting.pop(done).told:
                continue
            else:
                raise SandboxError("the keeper of a block has ended before its block")
    return False
