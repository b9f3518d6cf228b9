"""Calls to the operator's own command when somebody at the site should look at the guard.

The command is fixed in guard.toml, and gets one more word, its reason. It runs without a shell,
with no variable but PATH, and without input, so nothing that a server or an app chose reaches it.
"""

from __future__ import annotations

import logging
import math
import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress

logger = logging.getLogger("discreet.guard")

BUDGET = "budget"  # 80 % of it are spent
REFUSED = "refused"
LATE = "late"  # a reply leaves late, or a block can not be ended
FAILED = "failed"  # the guard did not start, or its sandbox has ended
BUDGET_SHARE = 0.8
HOUR = 3600.0
# Seconds until the next call for a reason, in one process.
PAUSES = {BUDGET: math.inf, REFUSED: HOUR, LATE: HOUR, FAILED: HOUR}
LAST_SECONDS = 10.0  # for commands that run when the guard ends


class Alerts:
    """Starts the command, and does not wait for it: a reply would be late otherwise. Within the
    pause after a call, or while one is running, there is no other call for the same reason."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        self.next: dict[str, float] = {}
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def call(self, reason: str) -> None:
        """Starts the command for a reason. An error is logged, and stops nothing else."""
        now = time.monotonic()
        if not self.command or now < self.next.get(reason, 0.0):
            return
        before = self.running.get(reason)
        if before is not None and before.poll() is None:
            return
        self.next[reason] = now + PAUSES[reason]
        try:
            self.running[reason] = subprocess.Popen(
                [*self.command, reason],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"PATH": os.defpath},
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            logger.error("the alert can't be sent: %s", error.strerror)

    def finish(self) -> None:
        """Waits a while for commands that are running, before the guard's process ends."""
        until = time.monotonic() + LAST_SECONDS
        for process in self.running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
