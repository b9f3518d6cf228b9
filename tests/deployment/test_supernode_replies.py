"""A SuperNode gets over ClientApps that end without a reply, or leave one that nobody waits for."""

from __future__ import annotations

import threading

import pytest
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.app.error import Error
from flwr.common.constant import ErrorCode, Status, SubStatus
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.constant import TaskType
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from discreet.deployment.flower_fixes import supernode_fixes
from discreet.deployment.flower_fixes.supernode_fixes import push_messages
from discreet.deployment.flower_home import wait_until

RUN, NODE = 7, 11
WAIT_SECONDS = 30.0


class Node:
    """A node's state, what it has sent, and a ClientApp that a test plays."""

    def __init__(self) -> None:
        self.store = InMemoryObjectStore()
        self.state = InMemoryNodeState(self.store)
        self.state.store_run(Run.create_empty(RUN))
        self.sent: list[Message] = []
        self.pushing: threading.Thread | None = None

    def takes(self, name: str) -> Message:
        """A message of the server, with a task for it, as Flower's SuperNode writes both down."""
        self.state.create_task(task_type=TaskType.CLIENT_APP, run_id=RUN, fab_hash="")
        message = Message(RecordDict({name: ArrayRecord({})}), dst_node_id=NODE, message_type="train")
        start_client_internal._insert_message(message, self.state, self.store)
        return message

    def starts(self) -> int:
        """A ClientApp for the first task that waits for one, as soon as there is one."""
        wait_until(lambda: self.state.get_tasks(statuses=[Status.PENDING]), WAIT_SECONDS, "a task")
        (task,) = self.state.get_tasks(statuses=[Status.PENDING])
        assert self.state.claim_task(task.task_id)
        assert self.state.activate_task(task.task_id)
        return task.task_id

    def reads(self) -> Message:
        (message,) = self.state.get_messages_legacy(run_ids=[RUN], is_reply=False, limit=1)
        return message

    def ends(self, task: int, *, failed: bool = False) -> None:
        assert self.state.finish_task(task, SubStatus.FAILED if failed else SubStatus.COMPLETED, "")

    def replies(self, message: Message, name: str) -> None:
        reply = Message(RecordDict({name: ArrayRecord({})}), reply_to=message)
        start_client_internal._insert_message(reply, self.state, self.store)

    def pushes(self) -> None:
        """Sends in a thread, as long as it takes."""
        self.pushing = threading.Thread(
            target=push_messages, args=(self.state, self.store, self._send, lambda *_: None), daemon=True
        )
        self.pushing.start()

    def done(self) -> list[Message]:
        assert self.pushing is not None
        self.pushing.join(WAIT_SECONDS)
        assert not self.pushing.is_alive()
        assert not self.state.msg_store
        return self.sent

    def _send(self, message: Message, tree: ObjectTree, _: float) -> tuple[set[str], str]:
        self.sent.append(message)
        return {tree.object_id}, "session"


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, RUN)
    return Node()


def test_a_reply_that_is_left_over_does_not_stand_for_the_next(node: Node) -> None:
    lost = node.takes("lost")
    task = node.starts()
    node.replies(node.reads(), "left over")
    node.ends(task)
    # What Flower does where it could not confirm a message: it forgets it, and sends nothing.
    node.state.delete_messages(message_ids=[lost.metadata.message_id])

    message = node.takes("order")
    node.pushes()
    wait_until(lambda: len(node.sent) == 1, WAIT_SECONDS, "one is sent")
    task = node.starts()
    node.replies(node.reads(), "reply")
    node.ends(task)
    assert [sent.metadata.reply_to_message_id for sent in node.done()] == [
        lost.metadata.message_id,
        message.metadata.message_id,
    ]


def test_a_client_app_that_ended_before_it_took_its_message_is_started_once_more(node: Node) -> None:
    message = node.takes("order")
    node.pushes()
    node.ends(node.starts(), failed=True)
    task = node.starts()
    node.replies(node.reads(), "reply")
    node.ends(task)
    (sent,) = node.done()
    assert sent.metadata.reply_to_message_id == message.metadata.message_id
    assert not sent.has_error()


@pytest.mark.parametrize("reads", [True, False])
def test_the_server_is_told_where_no_reply_will_come(node: Node, reads: bool) -> None:
    node.takes("order")
    node.pushes()
    for _ in range(1 if reads else 2):
        task = node.starts()
        if reads:
            node.reads()
        node.ends(task, failed=True)
    (sent,) = node.done()
    assert isinstance(sent.error, Error)
    assert sent.error.code == ErrorCode.CLIENT_APP_CRASHED


def test_a_node_whose_starter_has_ended_ends(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    # This process has no SuperExec below it.
    monkeypatch.setattr(supernode_fixes, "WATCH_SECONDS", 0.0)
    node.takes("order")
    with pytest.raises(RuntimeError, match="flower-superexec has ended"):
        push_messages(node.state, node.store, node._send, lambda *_: None)
