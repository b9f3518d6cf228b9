"""The app behind a mod. It may leave any settings behind, and a reply that was charged leaves all
the same."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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


def apart(work: Callable[[], T]) -> T:
    """The result of `work`, whatever default device and modes of PyTorch an app has left: they
    belong to a thread, so `work` has one of its own. It names its types of floats."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(work).result()
