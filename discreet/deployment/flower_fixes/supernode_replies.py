"""Lets a SuperNode get over a lost ClientApp, and a lost server.

Flower's SuperNode that has taken a message waits until any reply is there, and sends it: forever if a ClientApp exits
without replying, and one reply late from then on if one is left over from a message that it could not confirm (the
SuperLink was killed meanwhile). Here it waits for each message's own answer: the reply, or an error if no ClientApp is
at work any more. A ClientApp that ended before it took its message is started once more. If the process that starts
ClientApps has ended, or the node's loop has failed, this process ends too, and a restart policy brings all of it back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from flwr.app import Message
from flwr.common.constant import Status
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.constant import TaskType
from flwr.supercore.object_store import ObjectStore
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate.in_memory_nodestate import CLIENT_APP_CRASHED_ERROR, InMemoryNodeState, MessageEntry

from discreet.deployment.flower_fixes import Fixes
from discreet.simulation.processes import STARTER, below

LOOK_SECONDS, WATCH_SECONDS = 0.1, 5.0
push_what_lies_there = start_client_internal._push_messages
AT_WORK = (Status.PENDING, Status.STARTING, Status.RUNNING)

Send = Callable[[Message, ObjectTree, float], tuple[set[str], str]]
PushObject = Callable[[int, str, str, bytes], None]


class CompleteReplies:
    """The object store as a sender uses it; `get` raises if the rest of a reply will not come. Flower waits for it."""

    def __init__(self, store: ObjectStore, state: InMemoryNodeState) -> None:
        self.get_object_tree, self.delete = store.get_object_tree, store.delete
        self.store, self.state = store, state

    def get(self, object_id: str) -> bytes | None:
        """As `ObjectStore.get`: empty while an object is on its way."""
        at_work = _at_work(self.state)  # looked at first: who brings something is at work until it is there
        content = self.store.get(object_id)
        if content == b"" and not at_work:
            raise RuntimeError("the ClientApp ended before all of its reply was there")
        return content


def push_messages(state: InMemoryNodeState, object_store: ObjectStore, send: Send, push_object: PushObject) -> None:
    """Sends replies until the message that was just taken is answered; instead of Flower's function of this name.

    Raises:
      RuntimeError: no ClientApp would start any more.
    """
    # The one just taken comes last. What a run that was killed has left behind is not waited for.
    message, started_again = _entries(state, replies=False)[-1].message, False
    watch = time.monotonic() + WATCH_SECONDS
    while (entry := state.msg_store.get(message.metadata.message_id)) is not None:
        at_work = _at_work(state)  # looked at before the replies: a ClientApp is at work until its reply lies there
        if any(not reply.is_retrieved for reply in _entries(state, replies=True)):
            push_what_lies_there(state, CompleteReplies(object_store, state), send, push_object)  # type: ignore[arg-type]
        elif at_work:
            time.sleep(LOOK_SECONDS)
            if time.monotonic() > watch:
                watch = time.monotonic() + WATCH_SECONDS
                if os.path.isdir("/proc/self") and not below(os.getpid(), STARTER):
                    raise RuntimeError(f"this node's {STARTER.decode()} has ended: no ClientApp would start any more")
        elif entry.is_retrieved or started_again or (run := state.get_run(message.metadata.run_id)) is None:
            crashed = Message(CLIENT_APP_CRASHED_ERROR, reply_to=message)
            start_client_internal._insert_message(crashed, state, object_store)
        else:
            started_again = True
            state.create_task(task_type=TaskType.CLIENT_APP, run_id=run.run_id, fab_hash=run.fab_hash)


def _entries(state: InMemoryNodeState, *, replies: bool) -> list[MessageEntry]:
    with state.lock_msg_store:
        return [
            entry for entry in state.msg_store.values() if bool(entry.message.metadata.reply_to_message_id) == replies
        ]


def _at_work(state: InMemoryNodeState) -> bool:
    return bool(state.get_tasks(statuses=AT_WORK))


FIXES: Fixes = {"supernode_replies": ((start_client_internal, "_push_messages", push_messages),)}
