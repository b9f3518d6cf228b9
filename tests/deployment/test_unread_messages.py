"""A SuperLink's state stays as small as its open messages: what nobody will read any more goes, with its content."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.proto.task_pb2 import Task
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.superlink.servicer.runtime import runtime_handlers

from discreet.deployment.flower_fixes import superlink_fixes
from tests.deployment.link_state import LinkState

pytestmark = pytest.mark.filterwarnings(
    "ignore:No path_separator found:DeprecationWarning"
)  # Flower's settings of alembic

CONTENT = 200_000  # bytes of a message
HOUR = 3600.0


def content() -> RecordDict:
    """Never the same twice: a SuperLink keeps what is the same once."""
    return RecordDict({"update": ArrayRecord({"update": Array(np.random.default_rng().random(CONTENT // 8))})})


class Link(LinkState):
    """As its server and its nodes use it."""

    def join(self, name: str) -> int:
        node = self.state.create_node("", "", name.encode(), 1e6)
        assert self.state.activate_node(node, 1e6)
        return node

    def send(self, node: int) -> str:
        metadata = Metadata(
            **{"run_id": self.run, "message_id": "", "src_node_id": SUPERLINK_NODE_ID, "dst_node_id": node},
            **{"reply_to_message_id": "", "group_id": "1", "created_at": now().timestamp(), "ttl": HOUR / 2},
            message_type="train",
        )
        return self._put(make_message(metadata=metadata, content=content()))

    def _put(self, message: Message) -> str:
        message.metadata.__dict__["_message_id"] = message.object_id
        session = self.state.start_session(self.run)
        parts = get_all_nested_objects(message)
        stored, _ = self.state.store_message_and_object_tree(message, get_object_tree(message), session)
        for name, part in parts.items():
            assert not stored or self.state.store_object(self.run, session, name, part.deflate())
        return message.object_id if stored else ""

    def take(self, node: int) -> Message:
        """A node that is asked confirms that it has the message."""
        (message,) = self.state.get_message_ins(node, limit=1)
        self.store.delete(message.metadata.message_id)
        return message

    def reply(self, message: Message) -> str:
        return self._put(Message(content(), reply_to=message))

    def read(self, *asked: str) -> list[str]:
        """The replies that are there, as the server gets them, read and confirmed."""
        request = PullAppMessagesRequest(message_ids=asked)
        found = runtime_handlers.pull_messages(request, self.state, Task(run_id=self.run))
        names = [message.metadata.message_id for message in found.messages_list]
        assert all(self.store.get(name) for name in names)
        for name in names:
            self.store.delete(name)
        return names

    def wait_an_hour(self) -> None:
        """Every message grows older by that."""
        self.state.query("UPDATE message_ins SET created_at = created_at - :hour", {"hour": HOUR})

    def size(self) -> int:
        return sum(path.stat().st_size for path in self.path.parent.iterdir())


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replacement is made, for one test."""
    for owner, name, ours in superlink_fixes.FIXES["unread_messages"]:
        monkeypatch.setattr(owner, name, ours)


def round_with_losses(link: Link, nodes: list[int]) -> None:
    """Of three nodes one answers in time, one is gone, and the answer of the third comes when nobody looks for it."""
    asked = [link.send(node) for node in nodes]
    link.reply(link.take(nodes[0]))
    assert len(link.read(*asked)) == 1
    link.reply(link.take(nodes[2]))
    link.wait_an_hour()


def sizes_of(link: Link, *, rounds: int) -> list[int]:
    """The files' size after each round."""
    nodes, sizes = [link.join(name) for name in "abc"], []
    for _ in range(rounds):
        round_with_losses(link, nodes)
        sizes.append(link.size())
    return sizes


def test_eight_rounds_with_losses_take_no_more_room_than_five(tmp_path: Path) -> None:
    sizes = sizes_of(Link(tmp_path / "superlink.db"), rounds=8)
    assert sizes[7] <= 1.1 * sizes[4]
