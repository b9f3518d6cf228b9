"""Work on a client's data, once it is charged: it may fail in any way and take any time, and the
reply leaves all the same."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import TypeVar

from discreet.node.time_limit import in_main_thread, lift_limit, set_limit

T = TypeVar("T")
# The signals by which an operator ends a node. Flower's handlers of them raise SystemExit.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
NO_CHANGE = "the work of this round failed and counts as no change; noise alone leaves: %s"

logger = logging.getLogger("discreet.client")


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
