"""Patches of a SuperNode, by name: docs/flower_fixes.md gives the reasons.

`supernode_replies`: after taking a message, Flower's SuperNode waits for any reply and sends it. It
waits forever if a ClientApp exits without replying, and is one reply late from then on if a reply
is left over from a message that it could not confirm (because the SuperLink was killed). With this
patch it waits for each message's own answer: the reply, or an error if no ClientApp is running any
more. A ClientApp that ended before it took its message is started once more. If the process that
starts ClientApps has ended, or the node's loop has failed, this process ends too, and a restart
policy brings everything back.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from types import SimpleNamespace
from typing import Any

import httpx
from flwr.app import Message
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE, Status
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore import date
from flwr.supercore.constant import TaskType
from flwr.supercore.object_store import ObjectStore
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supernode import start_client_internal
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from flwr.supernode.nodestate.in_memory_nodestate import (
    CLIENT_APP_CRASHED_ERROR,
    InMemoryNodeState,
    MessageEntry,
)

from discreet.deployment.flower_fixes.told_processes import (
    FLOWERS_SECONDS,
    LONGEST_PAUSE,
    SHORTEST_SECONDS,
)

logger = logging.getLogger("discreet.node")

LOOK_SECONDS = 0.1
WATCH_SECONDS = 5.0
IDLE_SHARE = 0.2  # a node's pause between polls, as a share of the time without work
# seconds by which a SuperLink lets a node's clock be ahead
AHEAD = SYSTEM_TIME_TOLERANCE
BEHIND = TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
AT_WORK = (Status.PENDING, Status.STARTING, Status.RUNNING)

push_what_lies_there = start_client_internal._push_messages
pull_message = start_client_internal._pull_and_store_message
sign = NodeAuthHttpInterceptor.intercept
last = SimpleNamespace(run=None, worked=time.monotonic())

Send = Callable[[Message, ObjectTree, float], tuple[set[str], str]]
PushObject = Callable[[int, str, str, bytes], None]


class CompleteReplies:
    """The object store as a sender uses it. `get` raises if the rest of a reply will not come;
    Flower's own would wait."""

    def __init__(self, store: ObjectStore, state: InMemoryNodeState) -> None:
        self.get_object_tree = store.get_object_tree
        self.delete = store.delete
        self.store = store
        self.state = state

    def get(self, object_id: str) -> bytes | None:
        """As `ObjectStore.get`: empty while an object is still coming."""
        # Read first: a task is at work until its objects are there.
        at_work = self.state.get_tasks(statuses=AT_WORK)
        content = self.store.get(object_id)
        if content == b"" and not at_work:
            raise RuntimeError("the ClientApp ended before all of its reply was there")
        return content


def push_messages(
    state: InMemoryNodeState, object_store: ObjectStore, send: Send, push_object: PushObject
) -> None:
    """Sends replies until the last message is answered. Raises RuntimeError: no ClientApp would
    start any more."""
    # Imported here: a guarded SuperNode starts no ClientApp.
    from discreet.simulation.processes import STARTER, child_processes

    message = last_message(state)
    started_again = False
    watch = time.monotonic() + WATCH_SECONDS
    while (entry := state.msg_store.get(message.metadata.message_id)) is not None:
        # Read before the replies: a ClientApp is at work until its reply is there.
        at_work = bool(state.get_tasks(statuses=AT_WORK))
        if any(not reply.is_retrieved for reply in _entries(state, replies=True)):
            push_what_lies_there(state, CompleteReplies(object_store, state), send, push_object)  # type: ignore[arg-type]
        elif at_work:
            time.sleep(LOOK_SECONDS)
            if time.monotonic() > watch:
                watch = time.monotonic() + WATCH_SECONDS
                if os.path.isdir("/proc/self") and not child_processes(os.getpid(), STARTER):
                    raise RuntimeError(
                        f"this node's {STARTER.decode()} has ended: no ClientApp would start any "
                        "more"
                    )
        elif (
            entry.is_retrieved
            or started_again
            or (run := state.get_run(message.metadata.run_id)) is None
        ):
            crashed = Message(CLIENT_APP_CRASHED_ERROR, reply_to=message)
            start_client_internal._insert_message(crashed, state, object_store)
        else:
            started_again = True
            state.create_task(
                task_type=TaskType.CLIENT_APP, run_id=run.run_id, fab_hash=run.fab_hash
            )


def last_message(state: InMemoryNodeState) -> Message:
    """The message that was taken last. Messages left over from a killed run are ignored."""
    return _entries(state, replies=False)[-1].message


def _entries(state: InMemoryNodeState, *, replies: bool) -> list[MessageEntry]:
    with state.lock_msg_store:
        entries = list(state.msg_store.values())
    return [
        entry for entry in entries if bool(entry.message.metadata.reply_to_message_id) == replies
    ]


def pull(**given: Any) -> int | None:
    """Wraps Flower's `_pull_and_store_message`, which is called again after the work on a
    message."""
    if last.run is not None:
        last.worked = time.monotonic()
    run: int | None = pull_message(**given)
    last.run = run
    return run


def sleep(seconds: float) -> None:
    """Pauses, in place of Flower's fixed pause when there was no message. Soon after work the pause
    is short, so that successive rounds need not wait for it; after a long idle time it is
    DISCREET_LONGEST_PAUSE."""
    if seconds == FLOWERS_SECONDS:
        longest = float(os.environ.get(LONGEST_PAUSE, FLOWERS_SECONDS))
        seconds = min(longest, max(SHORTEST_SECONDS, IDLE_SHARE * (time.monotonic() - last.worked)))
    time.sleep(seconds)


def intercept(
    signer: NodeAuthHttpInterceptor, context: ProtobufRequestContext, call: ProtobufCall
) -> httpx.Response:
    """Signs and sends a call. If it is refused, this process logs the reason and ends."""
    answer = sign(signer, context, call)
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        logger.error("discreet: %s", reason(answer.headers.get_list("date")))
        sys.stdout.flush()
        os._exit(1)
    return answer


def reason(dates: list[str]) -> str:
    """The reason why a call was refused, judged by the server's clock: the first Date of its
    answer, in whole seconds."""
    if dates:
        ahead = (date.now() - parsedate_to_datetime(dates[0])).total_seconds()
    else:
        ahead = 0.0
    if ahead - 1 > -BEHIND and ahead <= AHEAD:
        return (
            "the server refused this node's signature: its key is not registered there, or no "
            "longer"
        )
    return (
        f"the server refused this node's time: its clock is {abs(ahead):.0f} s "
        f"{'ahead of' if ahead > 0 else 'behind'} the server's ({AHEAD} s ahead and {BEHIND} s "
        "behind are allowed). Set it, and start the node again"
    )


FIXES: dict[str, list[tuple[Any, str, object]]] = {
    "supernode_replies": [(start_client_internal, "_push_messages", push_messages)],
    "supernode_pauses": [
        (start_client_internal, "_pull_and_store_message", pull),
        (start_client_internal, "time", SimpleNamespace(sleep=sleep)),
    ],
    "refused_nodes": [(NodeAuthHttpInterceptor, "intercept", intercept)],
}
