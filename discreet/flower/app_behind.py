"""The app behind a mod. It may fail in any way and leave any settings behind, and a reply that was
charged leaves all the same."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from types import FrameType
from typing import TypeVar

from flwr.app import Context, Message, RecordDict

from discreet.node.time_limit import NO_CHANGE, in_main_thread, lift_limit

App = Callable[[Message, Context], Message]
T = TypeVar("T")
# The signals by which an operator ends a node. Flower's handlers of them raise SystemExit.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)

logger = logging.getLogger("discreet.client")


def read_from(
    app: App, message: Message, context: Context, read: Callable[[RecordDict], T]
) -> T | None:
    """What `read` finds in the app's reply to a copy of the message. None, which counts as no
    change: the app or `read` raised anything, or both together took longer than the message may.

    The time limit ends here: what follows is not interrupted. A signal that ends a node ends it
    also now, and also if the app sends it to itself.
    """
    given = deepcopy(message)
    with _noted_signals() as noted:
        try:
            try:
                # An error reply has no content, so this raises and its text stays here. `read` has
                # the limit of the app, whose content may be of its own classes.
                return read(app(given, context).content)
            finally:
                lift_limit()
        except BaseException as error:
            lift_limit()  # again, as the alarm may have gone off before the first was done
            if noted and isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            # The traceback has the text: an error of the app's own class may fail to give it.
            logger.error(NO_CHANGE, type(error).__name__, exc_info=True)
            return None


def apart(work: Callable[[], T]) -> T:
    """The result of `work`, whatever default device and modes of PyTorch an app has left: they
    belong to a thread, so `work` has one of its own. It names its types of floats."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(work).result()


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
