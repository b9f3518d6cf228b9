"""A node is checked before it connects (data, policy, ledger), and waits for each message's own
reply."""

from __future__ import annotations

import os
import ssl
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.app.error import Error
from flwr.common.config import parse_config_args
from flwr.common.constant import ErrorCode, Status, SubStatus
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.constant import TaskType
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.run import Run
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from discreet.deployment.certificates import make_authority
from discreet.deployment.flower_fixes import supernode_fixes
from discreet.deployment.flower_fixes.hand_over import SOCKET_VARIABLE
from discreet.deployment.flower_fixes.supernode_fixes import push_messages
from discreet.deployment.flower_fixes.told_processes import LONGEST_PAUSE
from discreet.deployment.flower_home import wait_until
from discreet.deployment.supernode import main
from tests.node.clients import ledger_at

COMMON = ("--superlink", "fl.example.org:9092", "--authority", "ca.crt", "--key", "node.key")


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The commands that this process would have become; it stands in a folder with a ca.crt."""
    monkeypatch.chdir(tmp_path)
    make_authority(Path())
    commands: list[list[str]] = []

    def become(_: str, words: list[str]) -> int:
        commands.append(words)
        return 0

    monkeypatch.setattr(os, "execvp", become)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setenv(SOCKET_VARIABLE, "one that runs already")
    monkeypatch.setenv(LONGEST_PAUSE, "")
    return commands


def start(folder: Path, *words: str) -> int:
    ledger_at(folder / "ledger.db")
    return main([*COMMON, "--ledger", str(folder / "ledger.db"), *words])


def test_a_checked_node_becomes_a_supernode_with_its_configuration(
    tmp_path: Path, executed: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "policy.json").write_text(
        '{"max-epsilon": 3, "max-delta": 0.001, "public-num-examples": 300}'
    )
    words = ("--partition", "1", "--of", "4", "--policy", str(tmp_path / "policy.json"))
    assert start(tmp_path, *words, "--longest-pause", "20") == 0
    assert os.environ[LONGEST_PAUSE] == "20.0"
    said = capsys.readouterr().out
    assert "this node's policy: max-epsilon=3, max-delta=0.001, public-num-examples=300\n" in said
    assert "public-num-examples=300: " in said
    (command,) = executed
    assert command[:3] == [sys.executable, "-m", "discreet.deployment.flower_fixes.commands"]
    assert "--insecure" not in command
    config = parse_config_args([command[command.index("--node-config") + 1]])
    assert config == {
        "ledger": str(tmp_path / "ledger.db"),
        "partition-id": 1,
        "num-partitions": 4,
        "policy": str(tmp_path / "policy.json"),
    }


PLACE = ("--partition", "0", "--of", "1")


@pytest.mark.parametrize(
    ("folder", "words", "message"),
    [
        ("a", (), "give either --data FOLDER or --partition"),
        ("a", ("--partition", "4", "--of", "4"), "--partition must be within 0 and --of"),
        ("a", (*PLACE, "--policy", "/nowhere.json"), "--policy:"),
        ("a", (*PLACE, "--policy", "wrong.json"), "max-epsilom"),
        ("a", ("--data", "/nowhere", "--task", "digits"), r"data.toml is missing"),
        ("a", (*PLACE, "--longest-pause", "61"), "(got 61)"),
        ('a"b', PLACE, "quotation mark"),  # a path that Flower would read wrongly
    ],
)
def test_what_is_wrong_is_said_before_anything_connects(
    folder: str,
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    executed: list[list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("wrong.json").write_text('{"max-epsilom": 3}')
    (tmp_path / folder).mkdir()
    assert start(tmp_path / folder, *words) == 2
    assert message in capsys.readouterr().out
    assert main([*COMMON, "--ledger", str(tmp_path / "none.db"), *PLACE]) == 2
    assert "none.db is missing" in capsys.readouterr().out
    assert not (tmp_path / "none.db").exists()
    assert executed == []


WRONG_AUTHORITIES: dict[str, Callable[[bytes], bytes]] = {
    "binary": lambda pem: ssl.PEM_cert_to_DER_cert(pem.decode()),
    "empty": lambda pem: b"",
    "a key": lambda pem: Path("ca.key").read_bytes(),
    "with a byte order mark": lambda pem: b"\xef\xbb\xbf" + pem,
    "cut": lambda pem: pem[: len(pem) // 2],
}


@pytest.mark.parametrize("change", WRONG_AUTHORITIES.values(), ids=WRONG_AUTHORITIES.keys())
def test_an_authority_that_is_no_certificate_is_refused_and_not_tried_for_ever(
    change: Callable[[bytes], bytes],
    tmp_path: Path,
    executed: list[list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    pem = Path("ca.crt").read_bytes()
    Path("ca.crt").write_bytes(change(pem))
    assert start(tmp_path, *PLACE) == 2
    assert "--authority: ca.crt holds no certificate in PEM" in capsys.readouterr().out
    Path("ca.crt").write_bytes(pem.replace(b"\n", b"\r\n"))
    assert main([*COMMON, "--ledger", str(tmp_path / "ledger.db"), *PLACE]) == 0
    Path("ca.crt").unlink()
    assert main([*COMMON, "--ledger", str(tmp_path / "ledger.db"), *PLACE]) == 2
    assert "--authority: ca.crt: No such file or directory" in capsys.readouterr().out
    assert len(executed) == 1


RUN, NODE = 1, 11
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
        message = Message(
            RecordDict({name: ArrayRecord({})}), dst_node_id=NODE, message_type="train"
        )
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
        """As a ClientApp's reply arrives: its objects are known as soon as it is there."""
        reply = Message(RecordDict({name: ArrayRecord({})}), reply_to=message)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        session = self.state.start_session(RUN)
        tree = get_object_tree(reply)
        stored, _ = self.state.store_message_and_object_tree(reply, tree, session)
        assert stored
        for object_id, content in get_all_nested_objects(reply).items():
            self.store.put(object_id, content.deflate())

    def pushes(self) -> None:
        """Sends in a thread, as long as it takes."""
        self.pushing = threading.Thread(
            target=push_messages,
            args=(self.state, self.store, self._send, lambda *_: None),
            daemon=True,
        )
        self.pushing.start()

    def done(self) -> list[Message]:
        self.pushing.join(WAIT_SECONDS)
        assert not self.pushing.is_alive()
        assert not self.state.msg_store
        return self.sent

    def _send(self, message: Message, tree: ObjectTree, _: float) -> tuple[set[str], str]:
        self.sent.append(message)
        return {tree.object_id}, "session"


@pytest.fixture
def node() -> Node:
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


def test_a_client_app_that_ended_before_it_took_its_message_is_started_once_more(
    node: Node,
) -> None:
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
