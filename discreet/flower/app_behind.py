"""The app behind a mod. It may leave any settings behind, and a reply that was charged leaves all
the same."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from typing import TypeVar

from flwr.app import Context, Message, RecordDict

from discreet.node.time_limit import done_on_data

App = Callable[[Message, Context], Message]
T = TypeVar("T")
N = TypeVar("N")


def read_from(
    app: App, message: Message, context: Context, read: Callable[[RecordDict], T]
) -> T | None:
    """What `read` finds in the app's reply to a copy of the message; None as `done_on_data`. The
    app has the node's state, and copies of its configuration: Flower keeps the context for the next
    message, whose policy and account follow from it."""
    given = deepcopy(message)
    own = replace(
        context, node_config=dict(context.node_config), run_config=dict(context.run_config)
    )
    # An error reply has no content, so this raises and its text stays here. `read` has the limit of
    # the app, whose content may be of its own classes.
    return done_on_data(lambda: read(app(given, own).content))


def noised_from(
    app: App,
    message: Message,
    context: Context,
    read: Callable[[RecordDict], T],
    noised: Callable[[T | None], N],
) -> N:
    """`noised` of what `read_from` gives, whatever default device and modes of PyTorch, traces and
    sizes of stacks the app has left: they belong to its thread, or to those that begin later, and
    `noised` has one that began before. It names its types of floats."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(bool).result()
        return thread.submit(noised, read_from(app, message, context, read)).result()
