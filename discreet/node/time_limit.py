"""The time limit of a message's work at a node: a server must not occupy a node longer than its
owner allows."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType

from discreet.node.account import Refused


class TimeIsUp(BaseException):
    """The work of a message has taken too long. It derives from BaseException, so that no `except
    Exception` in a model or app can catch it."""


def seconds_for(max_seconds: float, time_to_live: float) -> float:
    """The seconds that a message's work may still take: the owner's limit, or the message's
    remaining time if that is less.

    >>> seconds_for(86400.0, 600.0), seconds_for(60.0, 600.0)
    (600.0, 60.0)
    """
    if time_to_live > 0:
        return min(max_seconds, time_to_live)
    return 0.0


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """A block that is interrupted after so many seconds if it has not ended.

    Python runs signal handlers only in the main thread, where Flower calls a ClientApp. In other
    threads, a block that takes too long is refused when it ends. Earlier charges remain.

    Raises:
      Refused: the time is up.
    """
    if not seconds > 0:
        raise Refused("the message has exceeded its time to live")
    started = time.monotonic()
    is_main = threading.current_thread() is threading.main_thread()
    with suppress(TimeIsUp), _alarm(seconds) if is_main else nullcontext():
        yield
    if time.monotonic() - started >= seconds:
        raise Refused(
            f"the work of this message took {seconds:g} s, the most that this node allows"
        )


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raises TimeIsUp in the block after so many seconds. An alarm that was set before continues
    afterwards."""
    before = signal.signal(signal.SIGALRM, _end)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    started = time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - started), 1e-3))


def _end(number: int, frame: FrameType | None) -> None:
    raise TimeIsUp
