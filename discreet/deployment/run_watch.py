"""Watches the processes that a run on this machine needs, until it ends."""

from __future__ import annotations

import logging
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from discreet.deployment.flower_home import LOOK_SECONDS
from discreet.run_files.run_folder import OVER, RunFolder, state_of
from discreet.simulation.processes import RunLostError, child_processes

# the programs of a ServerApp, which run below a SuperLink
APPS = (
    b"flwr-serverapp",
    b"flwr-simulation",
)
APP_LOOK_SECONDS = 1.0
# Time for a ServerApp that has ended normally to be reported, before it counts as lost.
GONE_SECONDS = 5.0
LOST_SECONDS = 5.0
# Warnings of Flower's simulation that are about no run: in every run, even if the number of nodes
# is set; and of a worker that ends with its run.
NOT_SHOWN = (
    "Since flwr 1.32, default simulated SuperNodes changed",
    "Manually terminating ClientAppActor",
)
# A message of Flower without words, which ends each simulation.
EMPTY = re.compile(r"(\x1b\[\d+m)?INFO ?(\x1b\[0m)?: *")

logger = logging.getLogger("discreet")

Process = subprocess.Popen[bytes]


@dataclass
class RunWatch:
    """Watches the processes that a run needs.

    Attributes:
      run: its folder.
      superlink: the ancestor process of its ServerApp.
      proxy: the node proxy, without which no node is reached; None if there is none.
      nodes: the processes of nodes, by name.
      helpers: by name, processes without which a run is slower.
      clock: a function that returns seconds.
    """

    run: RunFolder
    superlink: Process
    proxy: Process | None = None
    nodes: Mapping[str, Process] = field(default_factory=dict)
    helpers: Mapping[str, Process] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    _told: set[str] = field(default_factory=set)
    _app_seen: float | None = None  # the time at which a ServerApp was last seen
    _looked: float = 0.0

    def check(self) -> None:
        """Raises RunLostError if a necessary process has ended; logs once the end of any other."""
        for name, process in (("the SuperLink", self.superlink), ("the node proxy", self.proxy)):
            if process is not None and process.poll() is not None:
                raise RunLostError(f"{name} has ended, with exit code {process.returncode}")
        others = {**self.nodes, **self.helpers}
        ended = {name for name, process in others.items() if process.poll() is not None}
        for name in sorted(ended - self._told):
            code = others[name].returncode
            logger.warning(
                "%s has ended, with exit code %d: the run continues without it", name, code
            )
        self._told |= ended
        if self.nodes and ended.issuperset(self.nodes):
            raise RunLostError("all nodes have ended")
        self._check_app()

    def _check_app(self) -> None:
        now = self.clock()
        if now - self._looked < APP_LOOK_SECONDS:
            return
        self._looked = now
        if child_processes(self.superlink.pid, APPS):
            self._app_seen = now
        elif (
            self._app_seen is not None
            and now - self._app_seen > GONE_SECONDS
            and state_of(self.run) not in OVER
        ):
            raise RunLostError("the ServerApp ended without an error message")


def _is_shown(line: str) -> bool:
    """False for a line of Flower's log that says nothing about a run."""
    return not EMPTY.fullmatch(line) and not any(words in line for words in NOT_SHOWN)


def follow(process: Process, log: Path, watch: RunWatch) -> None:
    """Prints the lines of a process's log until its end, so that the process itself never writes to
    this one's output. Raises RunLostError if a process that the run needs has ended earlier."""
    shown = 0
    ended = False
    while not ended:
        ended = process.poll() is not None
        text = log.read_text(errors="replace")
        end = len(text)
        if not ended:
            end = text.rfind("\n") + 1
        lines = text[shown:end].split("\n")
        print("\n".join(filter(_is_shown, lines)), end="", flush=True)
        shown = end
        if ended and process.returncode:
            # A lost SuperLink ends `flwr run` too, but its own end may be noticed only later.
            with suppress(subprocess.TimeoutExpired):
                watch.superlink.wait(LOST_SECONDS)
        if process.returncode != 0:
            watch.check()
        time.sleep(LOOK_SECONDS)
