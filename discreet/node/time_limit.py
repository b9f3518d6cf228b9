"""The time that the work of one message may take, and what may end that work.

Once a message is charged, its reply leaves: work on data may then fail in any way and take any
time.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

from discreet.node.account import Refused
from discreet.training.failing_units import TimeIsUp

if TYPE_CHECKING:
    from flwr.app import RecordDict

GRACE = 1.0  # seconds
AGAIN = 1e-3  # seconds until the alarm is tried again
T = TypeVar("T")
# The signals by which an operator ends a node. Flower's handlers of them raise SystemExit.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
NO_CHANGE = "the work of this round failed and counts as no change; noise alone leaves: %s"

logger = logging.getLogger("discreet.client")

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
    """Raises TimeIsUp; later, for GRACE seconds at most, while a context is entered or left: one
    that is left half done, such as PyTorch's no_grad, would hold for all later messages."""
    deadline = _deadline.get()
    if deadline is not None and time.monotonic() < deadline + GRACE and _is_amid_context(frame):
        signal.setitimer(signal.ITIMER_REAL, AGAIN)
        return
    raise TimeIsUp


def _is_amid_context(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name in ("__enter__", "__exit__"):
            return True
        frame = frame.f_back
    return False


def done_on_data(work: Callable[[], T]) -> T | None:
    """The result of work on data. None, which counts as no change: it raised anything, or the time
    of the message was up.

    The message's limit of time holds for the work alone: what follows is not interrupted. A signal
    that ends a node ends it also now, and also if the work sends it to its own process.
    """
    with _noted_signals() as noted:
        try:
            try:
                set_limit()
                return work()
            finally:
                lift_limit()
        except BaseException as error:
            lift_limit()  # again, as the alarm may have gone off before the first was done
            if noted and isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            # The traceback has the text: an error of an app's own class may fail to give it.
            logger.error(NO_CHANGE, type(error).__name__, exc_info=True)
            return None


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """The signals out of ENDING that arrive meanwhile. Their handlers run as before."""
    noted = list[int]()
    ours = {}
    if in_main_thread():  # only there do handlers run
        for number in ENDING:
            before = signal.getsignal(number)
            if callable(before):
                ours[number] = (partial(_note, noted, before), before)
                signal.signal(number, ours[number][0])
    try:
        yield noted
    finally:
        for number, (note, before) in ours.items():
            if signal.getsignal(number) is note:
                signal.signal(number, before)


def _note(
    noted: list[int],
    handler: Callable[[int, FrameType | None], object],
    number: int,
    frame: FrameType | None,
) -> None:
    noted.append(number)
    handler(number, frame)
