"""Each replacement of Flower's behaviour is made, can be switched off, and is not made in another
Flower."""

from __future__ import annotations

import logging
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
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

from benchmarks.load_speed import rows_of
from discreet.deployment.flower_fixes import superlink_fixes, supernode_fixes
from discreet.deployment.flower_fixes.commands import NAMES, SWITCH, VERSIONS, command, make
from discreet.deployment.flower_home import free_port
from discreet.deployment.local_federation import START_SECONDS
from tests.conftest import REPOSITORY
from tests.deployment.test_superlink import LinkState

FIXES = superlink_fixes.FIXES | supernode_fixes.FIXES


@pytest.fixture(autouse=True)
def flower_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    for places in FIXES.values():
        for owner, name, _ in places:
            monkeypatch.setattr(owner, name, getattr(owner, name))


def made() -> set[str]:
    """The replacements that are in their places after the commands of SuperLink and SuperNode have
    made theirs."""
    make("superlink_fixes")
    make("supernode_fixes")
    return {
        name
        for name, places in FIXES.items()
        if all(getattr(*place[:2]) is place[2] for place in places)
    }


def test_all_are_made_but_those_that_are_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "-database -failed_runs -warm_clients")
    assert made() == {*FIXES} - {"database", "failed_runs"}
    monkeypatch.setenv(SWITCH, "-databas")
    with pytest.raises(ValueError, match=r"takes -all, or some of -database .* \(got -databas\)"):
        made()


def test_in_another_flower_none_is_made_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "1.43.0")
    with caplog.at_level(logging.WARNING):
        assert made() == set()
    said, _ = caplog.messages  # of either
    assert "flwr 1.43.0 is not 1.41.0 or 1.42.0: Flower's own behaviour stays" in said


def test_the_page_tells_of_each() -> None:
    page = (REPOSITORY / "docs" / "flower_fixes.md").read_text()
    assert all(f"## {name}\n" in page for name in NAMES)
    assert all(version in page for version in VERSIONS)
    assert {*FIXES, "warm_clients"} == {*NAMES}


CONTENT = 200_000  # bytes of a message
HOUR = 3600.0


def content() -> RecordDict:
    """Never the same twice: a SuperLink keeps what is the same once."""
    return RecordDict(
        {"update": ArrayRecord({"update": Array(np.random.default_rng().random(CONTENT // 8))})}
    )


class Link(LinkState):
    """As its server and its nodes use it."""

    def join(self, name: str) -> int:
        node = self.state.create_node("", "", name.encode(), 1e6)
        assert self.state.activate_node(node, 1e6)
        return node

    def send(self, node: int) -> str:
        metadata = Metadata(
            **{
                "run_id": self.run,
                "message_id": "",
                "src_node_id": SUPERLINK_NODE_ID,
                "dst_node_id": node,
            },
            **{
                "reply_to_message_id": "",
                "group_id": "1",
                "created_at": now().timestamp(),
                "ttl": HOUR / 2,
            },
            message_type="train",
        )
        return self._put(make_message(metadata=metadata, content=content()))

    def _put(self, message: Message) -> str:
        message.metadata.__dict__["_message_id"] = message.object_id
        session = self.state.start_session(self.run)
        parts = get_all_nested_objects(message)
        stored, _ = self.state.store_message_and_object_tree(
            message, get_object_tree(message), session
        )
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


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replacement is made, for one test."""
    for owner, name, ours in superlink_fixes.FIXES["unread_messages"]:
        monkeypatch.setattr(owner, name, ours)


def round_with_losses(link: Link, nodes: list[int]) -> None:
    """Of three nodes one answers in time, one is gone, and the answer of the third comes when
    nobody looks for it."""
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


@pytest.mark.usefixtures("small")
@pytest.mark.filterwarnings(
    "ignore:No path_separator found:DeprecationWarning"
)  # Flower's settings of alembic
def test_eight_rounds_with_losses_take_no_more_room_than_five(tmp_path: Path) -> None:
    sizes = sizes_of(Link(tmp_path / "superlink.db"), rounds=8)
    assert sizes[7] <= 1.1 * sizes[4]


NODES, PARAMETERS = 10, 5_000_000
MOST_MEBIBYTES = (
    450  # 301 to 370 were measured from 4 to 40 nodes, 724 with ten of them and Flower's own
)


@pytest.mark.slow
@pytest.mark.parametrize(("off", "small"), [("", True), ("-content_garbage -database", False)])
def test_a_superlink_holds_little_of_what_ten_nodes_send(
    off: str, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, off)
    (row,) = rows_of(NODES, (PARAMETERS,), rounds=1)
    assert row["replies"] == NODES
    assert (row["link_mib"] < MOST_MEBIBYTES) is small


@contextmanager
def refusing(server_ahead: float) -> Iterator[int]:
    """The port of a server that answers every call with 401, and whose clock is so many seconds
    before this one's."""

    class Refuse(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(401)
            self.send_header("content-length", "0")
            self.end_headers()

        def date_time_string(self, timestamp: float | None = None) -> str:
            return format_datetime(datetime.now(UTC) + timedelta(seconds=server_ahead), usegmt=True)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refuse) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("server_ahead", "said"),
    [
        (3600, r"refused this node's time: its clock is 3[56]\d\d s behind the server's"),
        (0, "refused this node's signature: its key is not registered there"),
    ],
)
def test_a_node_that_is_refused_says_why_and_ends_with_1(
    server_ahead: float, said: str, tmp_path: Path
) -> None:
    with refusing(server_ahead) as port, (tmp_path / "log").open("w") as log:
        words = (
            "--insecure",
            "--superlink",
            f"127.0.0.1:{port}",
            "--host",
            "127.0.0.1",
            "--port",
            str(free_port()),
        )
        node = subprocess.Popen(command("supernode", *words), stdout=log, stderr=log)
        assert node.wait(START_SECONDS) == 1
    (line,) = [line for line in (tmp_path / "log").read_text().splitlines() if "discreet: " in line]
    assert re.search(said, line)
