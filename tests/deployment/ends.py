"""Ends of what a federation of processes has started: of a run, and of a process by SIGTERM or kill
-9."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from discreet.deployment.flower_home import wait_until
from discreet.deployment.local_federation import START_SECONDS, Federation
from discreet.run_files.run_folder import RunFolder, state_of

RUN_SECONDS = 300.0


def finish(federation: Federation, folder: RunFolder) -> None:
    """Until `flwr run` has seen the end of the run, and the run says so too."""
    process = federation.processes[f"run-{folder.path.name}"]
    wait_until(
        lambda: process.poll() is not None, RUN_SECONDS, f"flwr run of {folder.path.name} is over"
    )
    wait_until(
        lambda: state_of(folder) not in ("", "running"),
        START_SECONDS,
        f"{folder.path.name} has ended",
    )


def kill(federation: Federation, name: str) -> None:
    """kill -9 for a process and everything that it has started itself; what that started ends when
    it notices."""
    process = federation.processes.pop(name)
    children = [
        int(pid)
        for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ]
    for pid in (process.pid, *children):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def end(federation: Federation, name: str) -> None:
    """SIGTERM, and waits for the end."""
    process = federation.processes.pop(name)
    process.terminate()
    wait_until(lambda: process.poll() is not None, START_SECONDS, f"{name} has ended")
