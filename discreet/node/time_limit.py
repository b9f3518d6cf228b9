"""The time that the work of one message may take, and what may end that work."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from types import FrameType
from typing import TYPE_CHECKING

from discreet.node.account import Refused
from discreet.training.failing_units import TimeIsUp

if TYPE_CHECKING:
    from flwr.app import RecordDict

# When the work of the message at hand must be done, by time.monotonic; None without a limit.
_deadline: ContextVar[float | None] = ContextVar("_deadline", default=None)


def seconds_for(max_seconds: float, time_to_live: float) -> float:
    """The seconds that a message's work may still take: the owner's limit, or the message's
    remaining time if that is less.

    >>> seconds_for(86400.0, 600.0), seconds_for(60.0, 600.0)
    (600.0, 60.0)
    """
    if time_to_live > 0:
        return min(max_seconds, time_to_live)
    return 0.0


def done_within(seconds: float, work: Callable[[], RecordDict]) -> RecordDict:
    """The result of a message's work, which is interrupted after so many seconds.

    Python runs signal handlers only in the main thread, where Flower calls a ClientApp. In other
    threads work is not interrupted. Work that was charged answers all the same, with noise alone
    (`Client.answer`), so its reply leaves also when it is late.

    Raises:
      Refused: the time was up before anything was charged.
    """
    if not seconds > 0:
        raise Refused("the message has exceeded its time to live")
    if not in_main_thread():
        return work()
    try:
        return _interrupted_after(seconds, work)
    except TimeIsUp as error:
        raise Refused(
            f"the work of this message took {seconds:g} s, the most that this node allows"
        ) from error


def _interrupted_after(seconds: float, work: Callable[[], RecordDict]) -> RecordDict:
    """The result of `work`. TimeIsUp: it took longer. An alarm that was set before continues
    afterwards."""
    before = signal.signal(signal.SIGALRM, _end)
    started = time.monotonic()
    ours = _deadline.set(started + seconds)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return work()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        _deadline.reset(ours)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - started), 1e-3))


def set_limit() -> None:
    """Lets the limit of the message at hand interrupt what follows, if it has one."""
    deadline = _deadline.get()
    if deadline is not None and in_main_thread():
        signal.signal(signal.SIGALRM, _end)
        signal.setitimer(signal.ITIMER_REAL, max(deadline - time.monotonic(), 1e-6))


def lift_limit() -> None:
    """Lets nothing that follows be interrupted, neither by the limit of the message at hand nor by
    alarms that an app has set. `done_within` puts back the handler and the alarm that were there
    before."""
    if _deadline.get() is not None and in_main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)


def in_main_thread() -> bool:
    """True in the only thread in which Python runs handlers of signals."""
    return threading.current_thread() is threading.main_thread()


def _end(number: int, frame: FrameType | None) -> None:
    raise TimeIsUp
