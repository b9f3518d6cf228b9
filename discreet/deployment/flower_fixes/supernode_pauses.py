"""Has a SuperNode look for work soon after it had some, and seldom if it has had none for long.

Flower's node looks for a message every 3 s. This one waits 0.5 s, or a fifth of the time for which it has had nothing
to do, and 3 s or DISCREET_LONGEST_PAUSE at most: rounds that follow each other need not wait for it.
"""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

from flwr.supernode import start_client_internal

from discreet.deployment.flower_fixes import FLOWERS_SECONDS, LONGEST_PAUSE, SHORTEST_SECONDS, Fixes

IDLE_SHARE = 0.2  # of the time without work
pull_message = start_client_internal._pull_and_store_message
last = SimpleNamespace(run=None, worked=time.monotonic())


def pull(**given: Any) -> int | None:
    """Flower's `_pull_and_store_message`, which is called again when the work on a message is done."""
    if last.run is not None:
        last.worked = time.monotonic()
    run: int | None = pull_message(**given)
    last.run = run
    return run


def sleep(seconds: float) -> None:
    """Flower's pause when there was no message."""
    if seconds == FLOWERS_SECONDS:
        longest = float(os.environ.get(LONGEST_PAUSE, FLOWERS_SECONDS))
        seconds = min(longest, max(SHORTEST_SECONDS, IDLE_SHARE * (time.monotonic() - last.worked)))
    time.sleep(seconds)


FIXES: Fixes = {
    "supernode_pauses": (
        (start_client_internal, "_pull_and_store_message", pull),
        (start_client_internal, "time", SimpleNamespace(sleep=sleep)),
    )
}
