"""Processes that end, and folders that are removed, with the process that started them, even by
kill -9.

Run as a program this does one of two things:

- `tied` executes a command, which Linux kills when its parent ends.
- `remove` waits until its parent ends, ends the processes that were started with a folder, and
  removes the folder.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

SCRATCH = "DISCREET_SCRATCH"  # environment variable that names a scratch folder
STARTER = b"flower-superexec"  # starts ServerApps for a SuperLink, ClientApps for a SuperNode
# Ctrl-C, kill, and loss of the terminal
ENDING = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
)
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux
END_SECONDS = 10.0
LOOK_SECONDS = 0.02
WATCH_SECONDS = 0.5


def import_before_forking(names: Iterable[str]) -> None:
    """Imports those of these modules that are there, for processes that are forked from this one to
    run an app. Discreet's own modules are unloaded, as an app's bundle has its own copy."""
    for name in names:
        with suppress(ModuleNotFoundError):
            importlib.import_module(name)
    for name in [name for name in sys.modules if name.split(".")[0] == "discreet"]:
        del sys.modules[name]


class RunLostError(RuntimeError):
    """A process or machine that a run needs has ended. The message names it; the run can be
    resumed."""


def heard() -> list[signal.Signals]:
    """The signals that ask this process to end, except those that it was started to ignore
    (nohup)."""
    return [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]


def child_processes(
    ancestor: int | Collection[int], program: bytes | tuple[bytes, ...] = b""
) -> list[int]:
    """The living descendants of one or more processes, optionally only those of some programs; none
    if the system has no /proc."""
    if isinstance(ancestor, int):
        above = {ancestor}
    else:
        above = {*ancestor}
    parents = dict[int, int]()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            pid = int(entry.name)
            words = (entry / "cmdline").read_bytes().split(b"\0")
            # The name in parentheses may contain anything; the state and the parent follow it.
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            threads = len(os.listdir(entry / "task"))
        except (OSError, ValueError, IndexError):
            continue  # it has ended in the meantime
        if state in ("Z", "X") and threads <= 1:
            # A zombie has ended and waits for its parent. Other threads may outlive the first one.
            continue
        parents[pid] = int(parent)
        if any(word.endswith(program) for word in words[:2]):
            found.append(pid)
    return [pid for pid in found if not above.isdisjoint(_ancestors(pid, parents))]


def _ancestors(pid: int, parents: dict[int, int]) -> Iterator[int]:
    while pid in parents:
        pid = parents[pid]
        yield pid


def listens(ancestor: int, port: int) -> bool:
    """True if a process, or one of its descendants, listens on a TCP port; also if the system has
    no /proc."""
    tables = [table for table in map(Path, ("/proc/net/tcp", "/proc/net/tcp6")) if table.exists()]
    rows = [row.split() for table in tables for row in table.read_text().splitlines()[1:]]
    sockets = {
        f"socket:[{row[9]}]"
        for row in rows
        if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port
    }
    for pid in (ancestor, *child_processes(ancestor)):
        with suppress(OSError):  # it has ended in the meantime
            if any(os.readlink(file) in sockets for file in Path(f"/proc/{pid}/fd").iterdir()):
                return True
    return not tables


def tied(command: Sequence[str]) -> list[str]:
    """The command line that runs a command so that Linux kills it when the starting thread
    ends."""
    return _starts("tied", command)


def _starts(what: str, words: Sequence[str]) -> list[str]:
    return [
        sys.executable,
        "-P",
        "-S",
        str(Path(__file__).resolve()),
        what,
        str(os.getpid()),
        *words,
    ]


def removed_folder() -> tuple[Path, subprocess.Popen[bytes]]:
    """A new folder for this user alone, and the process that removes it when this one ends, even by
    kill -9; processes whose environment names the folder end before."""
    folder = Path(tempfile.mkdtemp(prefix="discreet-"))
    none = subprocess.DEVNULL
    command = _starts("remove", [str(folder)])
    return folder, subprocess.Popen(
        command, stdin=none, stdout=none, stderr=none, start_new_session=True
    )


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for this user alone, which is removed at the end of the block or of this process,
    even by kill -9. All processes that are started in the block, and their descendants, end too:
    their environment names the folder."""
    folder, remover = removed_folder()
    before = os.environ.get(SCRATCH)
    os.environ[SCRATCH] = str(folder)
    try:
        yield folder
    finally:
        os.environ.pop(SCRATCH) if before is None else os.environ.update({SCRATCH: before})
        _remove(folder)
        remover.kill()
        remover.wait()


def ray_environment(folder: Path) -> dict[str, str]:
    """Settings of Ray 2.55 for a cluster of one machine. It writes below `folder`, listens on the
    loopback interface only, and answers only processes that have its token, which is random each
    time."""
    return {
        "RAY_TMPDIR": str(folder),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # 0 is "one machine", on Linux too
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": os.urandom(32).hex(),
    }


def carrying(name: str, value: str) -> list[int]:
    """The other processes that were started with this value of an environment variable, and their
    descendants, since a process that sets its title may lose its variables. None if the system has
    no /proc."""
    found = []
    for pid in child_processes(0):
        with suppress(OSError):  # it has ended in the meantime, or belongs to another user
            if f"{name}={value}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return list({*found, *child_processes(found)} - {os.getpid()})


def end_carrying(name: str, value: str, *numbers: signal.Signals) -> None:
    """Ends the processes that `carrying` finds, and those that they start in the meantime. If a
    signal is not enough, the next one is sent."""
    for number in numbers:
        deadline = time.monotonic() + END_SECONDS
        while (left := carrying(name, value)) and time.monotonic() < deadline:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(LOOK_SECONDS)


def _remove(folder: Path) -> None:
    end_carrying(SCRATCH, str(folder), signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def _main(what: str, parent: int, words: Sequence[str]) -> None:
    if what == "remove":
        while os.getppid() == parent:
            time.sleep(WATCH_SECONDS)
        _remove(Path(words[0]))
        return
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:  # only on Linux
        prctl(DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() == parent:  # else it has ended already
        os.execvp(words[0], list(words))


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
