"""Every way to an answer of a node passes `check_promise`: the doors are listed here, and a new one
fails the test until it asks the owner, too."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict

import discreet
from discreet.flower.secure_sum_mod import secure_sum_mod
from discreet.flower.serving import encode_request, parameters_record
from discreet.ledger.durable_ledger import DurableLedger
from discreet.masking.wire import Stage
from discreet.node.account import Refused
from discreet.node.app import DPClient, train
from discreet.protocol.messages import request_items
from tests.node.clients import EXAMPLE, config, ledger_at, request
from tests.node.dishonest import NotGiven
from tests.node.test_secure_doors import App, behind_app, behind_mod

ROOT = Path(discreet.__file__).parent

# The files that make a reply to a message, each with why it may.
REPLIES = {
    "node/app.py": "`answered` calls its work with the owner's policy",
    "deployment/flower_fixes/supernode_fixes.py": "an error without content",
    "deployment/flower_fixes/supernode_guard.py": "the guard: guard.toml is its policy",
}
# The files that call `answered`.
DOORS = {"node/app.py", "flower/secure_sum_mod.py", "flower/local_dp_mod.py"}


def calls(name: str, *, keyword: str = "") -> set[str]:
    """The files of the package that call a function, or anything with this keyword."""
    found = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            given = {each.arg for each in node.keywords}
            if called == name and (not keyword or keyword in given):
                found.add(str(path.relative_to(ROOT)))
    return found


def test_no_file_replies_to_a_message_that_is_not_listed() -> None:
    assert calls("Message", keyword="reply_to") == {*REPLIES}
    assert calls("answered") == {*DOORS} | {"masking/node.py", "server/masking_server.py"}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What is asked of the owner, who refuses everything."""
    promises: list[object] = []

    def refuses(policy: object, promised: object) -> None:
        promises.append(promised)
        raise Refused("the owner was asked")

    for module in ("node.policy", "flower.local_dp_mod"):
        monkeypatch.setattr(f"discreet.{module}.check_promise", refuses)
    import flwr.supercore.task_identity as identity

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(identity.TaskIdentity, name, 1)
    return promises


# A policy that asks for something, since nobody is asked for a node without one.
POLICY = {"max-steps": 1_000_000, "max-delta": 0.5}
NODE: dict[str, str | int | float] = {"partition-id": 1, "num-partitions": 12, **POLICY}
DIGITS = (
    "data.name=digits",
    "data.num_clients=12",
    "model.name=logistic_regression",
    "privacy.delta=1e-3",
)


def by_the_app(folder: Path) -> str:
    node = {**NODE, "ledger": str(folder / "ledger.db")}
    ask = request(config(*EXAMPLE, *DIGITS))
    sent = encode_request(ask, parameters_record(torch.zeros(650)))
    reply = train(Message(sent, 1, "train"), Context(1, 1, node, RecordDict(), {}))
    return reply.error.reason


def by_fit(folder: Path) -> str:
    node = {**NODE, "ledger": str(folder / "ledger.db")}
    ask = request(config(*EXAMPLE, *DIGITS))
    with pytest.raises(Refused) as refused:
        DPClient(node).fit([np.zeros(650, np.float32)], dict(request_items(ask)))
    return str(refused.value)


def by_a_masked_app(folder: Path) -> str:
    with pytest.raises(NotGiven) as given:
        behind_app(folder, policy={"max-delta": "0.5"}).until(Stage.CONFIRM)
    return str(given.value)


def by_the_masked_mod(folder: Path) -> str:
    server = behind_mod(folder, policy={"max-delta": "0.5"})
    with pytest.raises(NotGiven) as given:
        server.until(Stage.CONFIRM)
    assert isinstance(server.door, App)
    assert server.door.calls == 0
    return str(given.value)


def by_the_local_mod(folder: Path) -> str:
    mod = discreet.local_dp_mod(
        clip_norm=1.0, target_epsilon=8.0, delta=1e-5, rounds=2, ledger=folder / "ledger.db"
    )
    arrays = ArrayRecord({"weight": Array(np.zeros(3, np.float32))})
    sent = Message(RecordDict({"arrays": arrays}), 1, "train")

    def never(message: Message, context: Context) -> Message:
        raise AssertionError("the app is called")

    return mod(sent, Context(1, 1, dict(POLICY), RecordDict(), {}), never).error.reason


EACH: dict[str, Callable[[Path], str]] = {
    "the ClientApp": by_the_app,
    "DPClient.fit": by_fit,
    "the ClientApp, masked": by_a_masked_app,
    "secure_sum_mod": by_the_masked_mod,
    "local_dp_mod": by_the_local_mod,
}


@pytest.mark.parametrize("door", EACH.values(), ids=EACH.keys())
def test_each_door_asks_the_owner_before_anything_is_charged_or_computed(
    door: Callable[[Path], str], asked: list[object], tmp_path: Path
) -> None:
    ledger_at(tmp_path / "ledger.db")
    assert door(tmp_path) == "the owner was asked"
    assert len(asked) == 1
    spent = DurableLedger(tmp_path / "ledger.db")
    assert [spent.spent(name).num_releases for name in ("user", "example", "local")] == [0, 0, 0]


def test_the_mod_of_masked_sums_is_the_one_that_the_package_gives() -> None:
    assert discreet.secure_sum_mod is secure_sum_mod
