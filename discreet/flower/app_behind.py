"""The app behind a mod. It may leave any settings behind, and a reply that was charged leaves all
the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from typing import TypeVar

from flwr.app import Context, Message, RecordDict

from discreet.node.time_limit import done_on_data

App = Callable[[Message, Context], Message]
T = TypeVar("T")


def read_from(
    app: App, message: Message, context: Context, read: Callable[[RecordDict], T]
) -> T | None:
    """What `read` finds in the app's reply to a copy of the message; None as `done_on_data`."""
    given = deepcopy(message)
    # An error reply has no content, so this raises and its text stays here. `read` has the limit of
    # the app, whose content may be of its own classes.
    return done_on_data(lambda: read(app(given, context).content))


@contextmanager
def begun_thread() -> Iterator[ThreadPoolExecutor]:
    """A thread that begins before the app and works after it, whatever default device and modes of
    PyTorch, traces and sizes of stacks the app has left: they belong to its thread, or to those
    that begin later. What works there names its types of floats."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(bool).result()
        yield thread
