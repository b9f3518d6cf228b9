"""Looks at the processes of this machine, and keeps a tree: `python discreet/deployment/processes.py COMMAND...`

Run as a program this is a keeper: it runs the command, and when the command ends, or the keeper is asked to end, or
whoever started the keeper is gone, it ends every process that came of the command. On Linux that includes those that
have left its session, as Ray's do: a keeper is the subreaper of all of them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

STARTER = b"flower-superexec"  # starts ServerApps for a SuperLink, ClientApps for a SuperNode
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C, kill, and the loss of the terminal
DIE_WITH_PARENT, SUBREAPER = 1, 36  # PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER of Linux
END_SECONDS, LOOK_SECONDS = 10.0, 0.02


def heard() -> list[signal.Signals]:
    """The signals that ask this process to end, but for those that whoever started it wants to be ignored (nohup)."""
    return [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]


def below(ancestor: int, program: bytes = b"") -> list[int]:
    """The living processes below a process, or those of a program; none if the system has no /proc."""
    parents: dict[int, int] = {}
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            pid, words = int(entry.name), (entry / "cmdline").read_bytes().split(b"\0")
            # The name in parentheses may hold anything; the state and the parent follow it.
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            threads = len(os.listdir(entry / "task"))
        except (OSError, ValueError, IndexError):
            continue  # it has ended in the meantime
        if state in ("Z", "X") and threads <= 1:
            continue  # it has ended, and waits for its parent to notice; its other threads may outlive the first one
        parents[pid] = int(parent)
        if any(word.endswith(program) for word in words[:2]):
            found.append(pid)
    return [pid for pid in found if ancestor in _ancestors(pid, parents)]


def _ancestors(pid: int, parents: dict[int, int]) -> Iterator[int]:
    while pid in parents:
        pid = parents[pid]
        yield pid


def end_below(ancestor: int) -> None:
    """Kills every process below a process, and those that they start in the meantime."""
    deadline = time.monotonic() + END_SECONDS
    while (left := below(ancestor)) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_SECONDS)


def kept(command: Sequence[str]) -> list[str]:
    """The command line that runs a command below a keeper, which is to be started by this process."""
    return [sys.executable, "-P", "-S", str(Path(__file__).resolve()), str(os.getpid()), *command]


def _keep(parent: int, command: Sequence[str]) -> int:
    for number in ENDING:
        signal.signal(number, _leave)
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(SUBREAPER, 1)
        prctl(DIE_WITH_PARENT, signal.SIGTERM)
    if os.getppid() != parent:
        return 1
    process = None
    try:
        process = subprocess.Popen(command)
        code = process.wait()
        return code if code >= 0 else 128 - code
    finally:
        if process is not None:
            process.kill()  # all that there is to end where the system has no /proc
        end_below(os.getpid())
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _leave(number: int, _: object) -> NoReturn:
    for each in ENDING:
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    raise SystemExit(_keep(int(sys.argv[1]), sys.argv[2:]))
