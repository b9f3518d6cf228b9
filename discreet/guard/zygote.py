"""The process that blocks are forked from: `python -m discreet.guard.zygote`. The guard starts it
in its sandbox.

It has imported Python, Flower and PyTorch, and no module of an app. For each block it forks a
keeper, which puts the block behind walls of its own (`enclosure`), watches its resource use, and
kills it with all its children at the deadline."""

from __future__ import annotations

import os
import select
import signal
import socket
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from discreet.guard.block_app import run_and_end, run_app
from discreet.guard.block_task import ALONE, DEADLINE, SPACES, BlockTask, unpacked
from discreet.guard.enclosure import (
    SUBREAPER,
    BlockLimits,
    call,
    check_landlock,
    enclose_by_landlock,
    enclose_in_spaces,
    new_spaces,
)
from discreet.guard.inside_kernel import HEAD, joined
from discreet.guard.own_kernel import memory_file, prepare_kernel, send_result, start_kernel
from discreet.guard.scratch import WatchedFolder, remove
from discreet.simulation.processes import (
    DIE_WITH_PARENT,
    child_processes,
    import_before_forking,
)

LOADED = (
    "flwr.supernode.cli.flwr_clientapp",
    "flwr.clientapp.utils",
    "torch",
    "torch.optim",
    "torch._dynamo",
    "torch.utils.data",
    "torch.fx.experimental.symbolic_shapes",
    "numpy.random",
    "pyarrow",
)
PREPARED_WITH = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}  # an image has one thread
WATCH_SECONDS = 0.1
TOO_LATE = "its {:g} seconds were over"
DATA = "/tmp/data"
COUNTED = ("RssAnon:", "RssShmem:", "VmPTE:", "VmSwap:")  # of a process, in /proc
FAILED = b"\0"
ENDED = b"\1"
KILOBYTES = 1 << 10  # of a megabyte


@dataclass(frozen=True)
class Pipes:
    """The descriptors of a block: files to read, pipes to write, and the entry to its group, which
    counts its memory. `done` belongs to the keeper alone, which writes there as its last deed that
    the block has ended."""

    task: int
    archive: int
    state: int
    out: int
    log: int
    done: int
    group: int


def import_libraries() -> None:
    """Imports the libraries that apps need, once."""
    import_before_forking(LOADED)
    import torch

    torch.set_num_threads(1)
    torch.nn.functional.linear(
        torch.ones(2, 2), torch.ones(2, 2)
    ).sum()  # looks at the processor now


def serve_keepers(control: socket.socket, readable: Sequence[str]) -> None:
    """Forks a keeper for each block that the guard asks for, until the guard has ended or closes
    the sandbox."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    control.sendall(ENDED)
    while True:
        asked, descriptors, _, _ = socket.recv_fds(
            control, DEADLINE.size, len(Pipes.__annotations__)
        )
        if not asked:
            return
        pipes = Pipes(*descriptors)
        if os.fork() == 0:
            control.close()
            _keep(pipes, readable, *DEADLINE.unpack(asked))
        for descriptor in descriptors:
            os.close(descriptor)


def _keep(pipes: Pipes, readable: Sequence[str], ends: float) -> NoReturn:
    """The keeper of one block: starts, watches and ends it, at a moment of the monotonic clock that
    does not depend on when it started."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        task = unpacked(_contents(pipes.task))
        limits = BlockLimits(**task.limits)  # type: ignore[arg-type]
        if readable == [ALONE]:
            _keep_in_kernel(task, pipes, limits, ends)
        elif readable == [SPACES]:
            _keep_in_spaces(task, pipes, limits, ends)
        else:
            _keep_by_landlock(task, pipes, limits, ends, readable=readable)
        code = 0
    except BaseException:  # noqa: BLE001  (a process of its own, which says why it ends)
        _log(pipes, traceback.format_exc()[-2000:])
    finally:
        with suppress(OSError):  # the guard has ended
            os.write(pipes.done, ENDED)
        os._exit(code)


def _forked() -> int:
    """Forks. The child ends with its parent, also by kill -9, as a block must with its keeper."""
    parent = os.pidfd_open(os.getpid())
    pid = os.fork()
    if pid == 0:
        call("prctl", DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        if select.select([parent], [], [], 0)[0]:  # it had ended before
            os._exit(1)
    os.close(parent)
    return pid


def _keep_in_spaces(task: BlockTask, pipes: Pipes, limits: BlockLimits, ends: float) -> None:
    new_spaces()
    pid = _forked()
    if pid == 0:
        _block(task, pipes, Path(DATA), lambda: enclose_in_spaces(limits))
    by_processes = not _has_group(pipes)
    _close(pipes)
    try:
        reason = _watch(pid, limits, ends, by_processes=by_processes)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # the first process of its space: all others end with it
        os.waitpid(pid, 0)
    _log_end(pipes, reason)


def _keep_in_kernel(task: BlockTask, pipes: Pipes, limits: BlockLimits, ends: float) -> None:
    parts = [_contents(each) for each in (pipes.task, pipes.archive, pipes.state)]
    given = memory_file(joined(parts))
    made = memory_file(size=HEAD + task.most_bytes)
    new_spaces()
    pid = _forked()
    if pid == 0:
        _enter_group(pipes)
        start_kernel(given, made, pipes.log, limits)
    watched = os.pidfd_open(pid)
    try:
        ended = select.select([watched], [], [], max(0.0, ends - time.monotonic()))[0]
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # the first process of its space: its kernel ends with it
        os.waitpid(pid, 0)
    if ended:
        send_result(made, pipes.out)
    _close(pipes)
    _log_end(pipes, "" if ended else TOO_LATE.format(limits.seconds))


def _keep_by_landlock(
    task: BlockTask, pipes: Pipes, limits: BlockLimits, ends: float, *, readable: Sequence[str]
) -> None:
    call("prctl", SUBREAPER, 1, 0, 0, 0)  # what outlives its parent becomes a child of the keeper
    home, *places = readable
    scratch = Path(tempfile.mkdtemp(dir=home))
    try:
        pid = _forked()
        if pid == 0:
            _at_home_in(scratch)
            _block(
                task,
                pipes,
                scratch / "data",
                lambda: enclose_by_landlock(limits, places, str(scratch)),
            )
        by_processes = not _has_group(pipes)
        _close(pipes)
        reason = _watch(pid, limits, ends, by_processes=by_processes, scratch=scratch)
    finally:
        _end_all_below()
        remove(scratch)
    _log_end(pipes, reason)


def _at_home_in(scratch: Path) -> None:
    folders = {"HOME": scratch, "TMPDIR": scratch / "tmp", "FLWR_HOME": scratch / "flwr"}
    for name, folder in folders.items():
        folder.mkdir(exist_ok=True)
        os.environ[name] = str(folder)
    tempfile.tempdir = None
    os.chdir(scratch)


def _end_all_below() -> None:
    """Kills all processes below this one until none is left: a process that forks while it is
    killed leaves children for the next pass."""
    while True:
        for pid in child_processes(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def _watch(
    pid: int,
    limits: BlockLimits,
    ends: float,
    *,
    by_processes: bool,
    scratch: Path | None = None,
) -> str:
    """Returns when the block's first process has ended, its time is over, or it exceeds a limit: of
    memory, if that is added up `by_processes`, or of the folder `scratch` if no namespace limits
    that. What is returned is the reason, or nothing if it has ended by itself."""
    watched = os.pidfd_open(pid)
    disk = None
    if scratch is not None:
        disk = WatchedFolder(scratch, limits.disk_mb)
    try:
        while (left := ends - time.monotonic()) > 0:
            if select.select([watched], [], [], min(left, WATCH_SECONDS))[0]:
                return ""
            if by_processes and _memory_mb(scratch) > limits.memory_mb:
                return f"it used more than limits.memory-mb = {limits.memory_mb}"
            if disk is not None and (reason := disk.exceeded()):
                return reason
        return TOO_LATE.format(limits.seconds)
    finally:
        os.close(watched)


def _log_end(pipes: Pipes, reason: str) -> None:
    """Adds the reason why a block was ended to its log, which is the site's alone."""
    if reason:
        _log(pipes, f"\nThe guard has ended this block: {reason}.\n")


def _log(pipes: Pipes, text: str) -> None:
    with suppress(OSError):  # the guard reads no further than the slot
        os.write(pipes.log, text.encode())


def _memory_mb(scratch: Path | None) -> float:
    """The memory in megabytes of the block's processes that is not backed by a file on disk:
    private memory, page tables, what was swapped, and shared memory, which counts for each process.
    In namespaces /proc shows only these processes, since the block has mounted it."""
    if scratch is None and Path("/proc/self").exists():
        return 0.0  # it has not mounted its own yet, and these are all blocks' processes
    if scratch is None:
        processes = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    else:
        processes = child_processes(os.getpid())
    kilobytes = 0
    for pid in processes:
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            told = [line.split() for line in lines if line.startswith(COUNTED)]
            kilobytes += sum(int(words[1]) for words in told)
    return kilobytes / KILOBYTES


def _block(task: BlockTask, pipes: Pipes, data: Path, enclose: object) -> NoReturn:
    """The first process of a block. Inside the walls it keeps only the two pipes open."""

    def app() -> None:
        _enter_group(pipes)
        os.close(pipes.done)
        os.setsid()
        archive = _contents(pipes.archive)
        state = _contents(pipes.state)
        out = _only_these_open(pipes)
        enclose()  # type: ignore[operator]
        data.mkdir(exist_ok=True)
        run_app(task, archive=archive, state=state, data=data, out=out)

    run_and_end(app)


def _has_group(pipes: Pipes) -> bool:
    """True if the kernel counts the block's memory; else its entry is a device without effect."""
    return stat.S_ISREG(os.fstat(pipes.group).st_mode)


def _enter_group(pipes: Pipes) -> None:
    """From now on the memory of this process counts in the group of its block. Where a machine has
    none left, the block ends, before its keeper, the sandbox and the guard."""
    Path("/proc/self/oom_score_adj").write_text("1000")
    os.write(pipes.group, b"0")


def _only_these_open(pipes: Pipes) -> int:
    """Makes the log the output and nothing the input, and closes all other descriptors but the pipe
    of the result, which is returned."""
    out = 3
    result = os.dup(pipes.out)
    log = os.dup(pipes.log)
    nothing = os.open("/dev/null", os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.dup2(result, out)
    os.closerange(out + 1, 1 << 16)
    return out


def _contents(descriptor: int) -> bytes:
    """The whole content of a file, whatever other users of the shared descriptor have read."""
    size = os.fstat(descriptor).st_size
    parts = []
    at = 0
    while at < size:
        part = os.pread(descriptor, size - at, at)
        if not part:
            raise OSError("a file of the guard is shorter than before")
        parts.append(part)
        at += len(part)
    return b"".join(parts)


def _close(pipes: Pipes) -> None:
    """Closes what the keeper does not need itself: it adds to the log, and `done` ends with it."""
    for descriptor in (pipes.task, pipes.archive, pipes.state, pipes.out, pipes.group):
        os.close(descriptor)


def main(words: Sequence[str]) -> int:
    """Serves the guard over the descriptor whose number is the first argument. The other arguments
    are `spaces`, or `kernel`, or for Landlock the folder of the blocks' scratch folders and the
    paths that they may read."""
    control = socket.socket(fileno=int(words[0]))
    readable = list(words[1:])
    if readable == [ALONE]:
        prepare_kernel(LOADED, {**os.environ, **PREPARED_WITH})
    else:
        if readable != [SPACES]:
            check_landlock(readable[1:])
            call("prctl", SUBREAPER, 1, 0, 0, 0)  # what outlives its keeper becomes a child of this
        import_libraries()
    serve_keepers(control, readable)
    if readable not in ([ALONE], [SPACES]):
        _end_all_below()
        remove(Path(readable[0]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
