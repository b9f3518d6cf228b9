"""Lets a SuperNode get over a lost ClientApp, and look for work soon.

Flower's SuperNode that has taken a message waits until any reply is there, and sends it. If a ClientApp exits without
replying, the node waits forever. If a reply is left over from a message that the node could not confirm (the SuperLink
was killed meanwhile), the node sends that one, and is one reply behind from then on: it is connected, and never in time
again. Here the node waits for each message's own answer: the reply, or an error if no ClientApp is at work any more. A
ClientApp that ended before it took its message is started once more. If the process that starts ClientApps has ended,
or the node's loop has failed, this process ends too, so that a restart policy brings all of it back.

Flower's node looks for a message every 3 s. This one waits 0.5 s, or a fifth of the time for which it has had nothing
to do, and 3 s or DISCREET_LONGEST_PAUSE at most: rounds that follow each other need not wait for it, and a node that is
seldom asked looks as seldom as Flower's, or less often.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from flwr.app import Message
from flwr.common.constant import Status
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.constant import TaskType
from flwr.supercore.object_store import ObjectStore
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate.in_memory_nodestate import CLIENT_APP_CRASHED_ERROR, InMemoryNodeState, MessageEntry

from discreet.deployment.flower_fixes.commands import FLOWERS_SECONDS, LONGEST_PAUSE, SHORTEST_SECONDS, applies
from discreet.processes import STARTER, below

LOOK_SECONDS, WATCH_SECONDS = 0.1, 5.0
IDLE_SHARE = 0.2  # of the time without work
LOOP, push_what_lies_there = start_client_internal.start_client_internal, start_client_internal._push_messages
REPLIES = (LOOP, push_what_lies_there, start_client_internal._insert_message, InMemoryNodeState, MessageEntry)
REPLIES_EXPECTED, PAUSES_EXPECTED = "f0e6ead2168d", "9e89a6eb68fb"
AT_WORK = (Status.PENDING, Status.STARTING, Status.RUNNING)

Send = Callable[[Message, ObjectTree, float], tuple[set[str], str]]
PushObject = Callable[[int, str, str, bytes], None]


class LostReplyError(Exception):
    """The ClientApp ended before all of its reply was there."""


class StarterEndedError(Exception):
    """The process that starts ClientApps has ended."""


class CompleteReplies:
    """The object store as a sender uses it: raises if the rest of a reply will not come, which Flower waits for."""

    def __init__(self, store: ObjectStore, at_work: Callable[[], bool]) -> None:
        self.get_object_tree, self.delete = store.get_object_tree, store.delete
        self.store, self.at_work = store, at_work

    def get(self, object_id: str) -> bytes | None:
        """As `ObjectStore.get`: empty while an object is on its way.

        Raises:
          LostReplyError: nobody is left who would bring it.
        """
        at_work = self.at_work()  # looked at first: who brings something is at work until it is there
        content = self.store.get(object_id)
        if content == b"" and not at_work:
            raise LostReplyError("the ClientApp ended before all of its reply was there")
        return content


def push_messages(state: InMemoryNodeState, object_store: ObjectStore, send: Send, push_object: PushObject) -> None:
    """Sends replies until every message that was taken has been answered; instead of Flower's function of this name.

    Raises:
      StarterEndedError: no ClientApp would start any more.
    """
    started_again: set[str] = set()
    watch = time.monotonic() + WATCH_SECONDS
    # The one just taken comes last. What a run that was killed has left behind is not waited for.
    taken = [entry.message.metadata.message_id for entry in _entries(state, replies=False)][-1:]
    while waiting := [e for e in _entries(state, replies=False) if e.message.metadata.message_id in taken]:
        at_work = _at_work(state)  # looked at before the replies: a ClientApp is at work until its reply lies there
        if _entries(state, replies=True):
            complete = CompleteReplies(object_store, lambda: _at_work(state))
            push_what_lies_there(state, complete, send, push_object)  # type: ignore[arg-type]
        elif at_work:
            time.sleep(LOOK_SECONDS)
            if time.monotonic() > watch:
                if os.path.isdir("/proc/self") and not below(os.getpid(), STARTER):
                    raise StarterEndedError(
                        f"this node's {STARTER.decode()} has ended: no ClientApp would start any more"
                    )
                watch = time.monotonic() + WATCH_SECONDS
        else:
            for entry in waiting:
                _start_again_or_give_up(entry, state, object_store, started_again)


def _entries(state: InMemoryNodeState, *, replies: bool) -> list[MessageEntry]:
    """Messages that wait for their reply, or replies that were not sent yet."""
    with state.lock_msg_store:
        found = [
            entry for entry in state.msg_store.values() if bool(entry.message.metadata.reply_to_message_id) == replies
        ]
    return [entry for entry in found if not entry.is_retrieved] if replies else found


def _at_work(state: InMemoryNodeState) -> bool:
    return bool(state.get_tasks(statuses=AT_WORK))


def _start_again_or_give_up(
    entry: MessageEntry, state: InMemoryNodeState, object_store: ObjectStore, started_again: set[str]
) -> None:
    message, run_id = entry.message, entry.message.metadata.run_id
    run = state.get_run(run_id)
    if run is not None and not entry.is_retrieved and message.metadata.message_id not in started_again:
        started_again.add(message.metadata.message_id)
        state.create_task(task_type=TaskType.CLIENT_APP, run_id=run_id, fab_hash=run.fab_hash)
        return
    start_client_internal._insert_message(Message(CLIENT_APP_CRASHED_ERROR, reply_to=message), state, object_store)


class Pauses:
    """`time` for the loop of a SuperNode: sleeps less if there was work a moment ago, `longest` if there was none."""

    def __init__(
        self,
        longest: float = FLOWERS_SECONDS,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.longest, self.now, self.really_sleep = longest, now, sleep
        self.worked_at = now()

    def worked(self) -> None:
        """There was work just now."""
        self.worked_at = self.now()

    def sleep(self, seconds: float) -> None:
        """At most `seconds`, or `longest` instead of Flower's pause."""
        longest = self.longest if seconds == FLOWERS_SECONDS else seconds
        self.really_sleep(min(longest, max(SHORTEST_SECONDS, IDLE_SHARE * (self.now() - self.worked_at))))


def be_patient() -> None:
    """Makes the SuperNode that this process becomes wait for every message's own reply, and for messages not long."""
    if applies("supernode_replies", *REPLIES, expected=REPLIES_EXPECTED):
        start_client_internal._push_messages = push_messages  # type: ignore[assignment]
    if applies("supernode_pauses", LOOP, expected=PAUSES_EXPECTED):
        _pause_less()


def _pause_less() -> None:
    pauses = Pauses(float(os.environ.get(LONGEST_PAUSE, FLOWERS_SECONDS)))
    push_replies = start_client_internal._push_messages

    def push(*args: Any, **kwargs: Any) -> None:
        push_replies(*args, **kwargs)
        pauses.worked()

    start_client_internal._push_messages = push
    start_client_internal.__dict__["time"] = pauses
