"""Has a SuperNode look for work soon after it had some, and seldom if it has had none for long.

Flower's node looks for a message every 3 s. This one waits 0.5 s, or a fifth of the time for which it has had nothing
to do, and 3 s or DISCREET_LONGEST_PAUSE at most: rounds that follow each other need not wait for it, and a node that is
seldom asked looks as seldom as Flower's, or less often.
"""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

from flwr.supernode import start_client_internal

from discreet.deployment.flower_fixes import FLOWERS_SECONDS, LONGEST_PAUSE, SHORTEST_SECONDS, applies

IDLE_SHARE = 0.2  # of the time without work
EXPECTED = "9e89a6eb68fb"


def make() -> None:
    """Makes the SuperNode that this process becomes do so."""
    if not applies("supernode_pauses", start_client_internal.start_client_internal, expected=EXPECTED):
        return
    longest, worked_at = float(os.environ.get(LONGEST_PAUSE, FLOWERS_SECONDS)), time.monotonic()
    push_replies = start_client_internal._push_messages

    def push(**given: Any) -> None:
        nonlocal worked_at
        push_replies(**given)
        worked_at = time.monotonic()

    def sleep(seconds: float) -> None:
        if seconds == FLOWERS_SECONDS:
            seconds = min(longest, max(SHORTEST_SECONDS, IDLE_SHARE * (time.monotonic() - worked_at)))
        time.sleep(seconds)

    start_client_internal._push_messages = push  # type: ignore[assignment]
    start_client_internal.__dict__["time"] = SimpleNamespace(sleep=sleep)
