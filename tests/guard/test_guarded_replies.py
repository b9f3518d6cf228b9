"""What a guarded SuperNode sends: one reply to each message, with a constant run time, at a fixed
time."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.common.constant import Status
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.run import Run
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from discreet.deployment.flower_fixes import supernode_guard
from discreet.deployment.flower_fixes.supernode_guard import (
    FAILED,
    RUNTIME,
    GuardedReplies,
    no_runtime_api,
)
from discreet.deployment.supernode import main
from discreet.guard.alerts import Alerts
from discreet.guard.reply_slots import ReplySlots
from discreet.guard.sandbox import SandboxError
from discreet.guard.site_guard import Answer, App
from discreet.node.account import Refused
from discreet.settings.rules import ConfigError
from tests.guard.made import RUN, guard_toml, message

SECONDS = 600.0
DIGEST = hashlib.sha256(b"bundle").hexdigest()
CONTENT = RecordDict({"metrics": MetricRecord({"num-examples": 2})})


class Node:
    """A node's state, what it has sent, how long each app is said to have taken, and the moments
    that it has waited for."""

    def __init__(self, answer: Callable[[Message, Context, App, ReplySlots], Answer]) -> None:
        self.store = InMemoryObjectStore()
        self.state = InMemoryNodeState(self.store)
        run = Run.create_empty(RUN)
        run.fab_hash = DIGEST
        self.state.store_run(run)
        self.state.store_fab(Fab(DIGEST, b"bundle", {}))
        self.state.set_run_series_context(
            run.series_id, Context(RUN, 11, {}, RecordDict(), {}, run.series_id)
        )
        self.sent: list[tuple[Message, float]] = []
        self.waits: list[ReplySlots] = []
        guard = SimpleNamespace(answer=answer, policy=SimpleNamespace(round_seconds=SECONDS))
        self.replies = GuardedReplies(guard)  # type: ignore[arg-type]

    def answers(self) -> bool:
        """Takes a message and answers it; True if the reply has waited for its time."""
        self.state.create_task(task_type=TaskType.CLIENT_APP, run_id=RUN, fab_hash=DIGEST)
        start_client_internal._insert_message(message(), self.state, self.store)
        started = time.monotonic()
        with patch.object(ReplySlots, "wait", lambda slots: self._waits(slots)):
            self.replies(
                state=self.state,
                object_store=self.store,
                send=self._send,
                push_object=lambda *_: None,
            )
        for slots in self.waits:
            assert started <= slots.started <= time.monotonic()
        return bool(self.waits)

    def _waits(self, slots: ReplySlots) -> None:
        assert not self.sent
        self.waits.append(slots)

    def _send(self, reply: Message, tree: ObjectTree, runtime: float) -> tuple[set[str], str]:
        self.sent.append((reply, runtime))
        return {tree.object_id}, "session"


def failing(error: Exception) -> Callable[[Message, Context, App, ReplySlots], Answer]:
    def answer(*_: object) -> Answer:
        raise error

    return answer


def test_a_charged_reply_leaves_at_its_time_with_a_constant_run_time() -> None:
    node = Node(lambda *_: Answer(CONTENT, charged=True))
    assert node.answers()
    ((reply, runtime),) = node.sent
    assert (dict(reply.content["metrics"]), runtime) == ({"num-examples": 2}, RUNTIME)
    assert not node.state.msg_store
    assert not node.state.get_tasks(statuses=[Status.PENDING])


def test_what_is_refused_before_anything_ran_says_why() -> None:
    node = Node(failing(Refused("the budget is spent")))
    node.answers()
    ((reply, _),) = node.sent
    assert reply.error.reason == "the budget is spent"


def test_a_server_that_is_refused_again_and_again_is_slowed_until_it_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(supernode_guard.time, "sleep", pauses.append)
    node = Node(failing(Refused("no")))
    for _ in range(18):
        node.answers()
    assert pauses == [0.0] * 10 + [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    node.replies.guard.answer = lambda *_: Answer(CONTENT, charged=True)  # type: ignore[method-assign]
    node.sent.clear()
    node.answers()
    node.waits.clear()
    node.replies.guard.answer = failing(Refused("no"))  # type: ignore[method-assign]
    node.answers()
    assert pauses[-1] == 0.0


def test_a_node_whose_sandbox_has_ended_answers_calls_its_operators_and_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    node = Node(failing(SandboxError("the sandbox has ended")))
    node.replies.guard.alerts = teller(tmp_path)
    node.answers()
    assert (len(node.sent), codes) == (1, [1])
    assert (tmp_path / "failed").exists()


def teller(folder: Path) -> Alerts:
    """The calls of a command that leaves a file with the name of the reason."""
    return Alerts(["/bin/sh", "-c", f"touch '{folder}'/$1", "tell"])


def test_operators_are_called_where_a_guard_does_not_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    guard_toml(tmp_path, alert=list(teller(tmp_path).command))
    monkeypatch.setattr(supernode_guard, "LOCKS", ExitStack())
    with pytest.raises(ConfigError):
        supernode_guard.install(tmp_path / "guard.toml")  # there is no split
    assert (tmp_path / "failed").exists()


@pytest.mark.parametrize(
    "error", [ArithmeticError("a row: 1.0"), ValueError("a row: 1.0"), OSError("a row: 1.0")]
)
def test_a_failure_says_nothing_and_leaves_at_the_same_time(error: Exception) -> None:
    node = Node(failing(error))
    assert node.answers()
    ((reply, runtime),) = node.sent
    assert (reply.error.reason, runtime) == (FAILED, RUNTIME)


def test_a_bundle_and_a_message_reach_the_guard_whole() -> None:
    seen = []

    def answer(given: Message, _: Context, app: App, slots: ReplySlots) -> Answer:
        assert slots.seconds == SECONDS
        seen.append((given.content["config"]["lr"], app.bundle, app.digest))
        return Answer(CONTENT, charged=False)

    node = Node(answer)
    assert not node.answers()
    assert seen == [(0.1, b"bundle", DIGEST)]


def test_nobody_listens_for_an_app() -> None:
    server, thread = no_runtime_api(None, None)
    assert not thread.is_alive()
    assert server.should_exit is False  # type: ignore[attr-defined]


def test_a_node_whose_walls_do_not_hold_does_not_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    guard_toml(tmp_path)
    monkeypatch.setattr(supernode_guard, "LOCKS", ExitStack())
    monkeypatch.setattr(supernode_guard, "check_site", lambda path: path)
    closed = []
    sandbox = SimpleNamespace(close=lambda: closed.append(True))
    monkeypatch.setattr(supernode_guard, "Sandbox", lambda policy: sandbox)
    monkeypatch.setattr(supernode_guard, "broken_walls", lambda given: ["a TCP port"])
    with pytest.raises(SandboxError, match="reach a TCP port"):
        supernode_guard.install(tmp_path / "guard.toml")
    assert closed == [True]


@pytest.mark.parametrize(
    "words", [("--data", "x"), ("--partition", "0"), ("--policy", "p.json"), ("--ledger", "l.db")]
)
def test_a_guarded_node_takes_no_data_policy_or_account_but_its_guards(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("--superlink", "fl.example.org:9092", "--authority", "ca.crt", "--key", "node.key")
    assert main([*common, "--guard", "guard.toml", *words]) == 2
    assert f"{words[0]} goes without --guard" in capsys.readouterr().out
