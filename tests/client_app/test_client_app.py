"""The ClientApp: a message in, a reply or a refusal with its reason out."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

import client_app.client
from client_app.client_app import app, in_simulation
from client_app.nodes import share_of
from discreet.config import RunConfig, config_to_json
from discreet.federated.durable_ledger import DurableLedger
from discreet.federated.messages import REFUSED_CODE, Order, decode_reply, encode_order, parameters_record
from discreet.privacy.events import poisson_round_event
from discreet.privacy.randomness import secure_source
from discreet.tasks.models import build_model
from discreet.training.local_training import LocalSettings, local_update
from tests.client_app.clients import EXAMPLE, OFF, config

SIZE = 650
Node = dict[str, bool | float | int | str]

NODE: Node = {"partition-id": 1, "num-partitions": 4}


@pytest.fixture(autouse=True)
def _task_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    # Flower's Message takes these from the process that it runs in.
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.fixture
def _simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))


def run_of(*words: str) -> RunConfig:
    # Full batches: the update follows from the data alone.
    return config(*words, "data.name=digits", "data.num_clients=4", "model.name=logistic_regression")


def send(content: RecordDict, kind: str = "train", node: Node = NODE) -> Message:
    message = Message(content, dst_node_id=1, message_type=kind)
    message.metadata.__dict__["_message_id"] = "m1"
    return app(message, Context(1, 1, node, RecordDict(), {}))


def ordered(run: RunConfig, client_id: int | None = None, folder: Path | None = None) -> RecordDict:
    order = Order(1, float("inf"), config_to_json(run), client_id, None if folder is None else str(folder))
    return encode_order(order, parameters_record(torch.zeros(SIZE)))


def update_of(run: RunConfig, client: int) -> torch.Tensor:
    model = build_model("logistic_regression", (1, 8, 8), 10, seed=3)
    how = LocalSettings(1, 1000, run.training.learning_rate, 0.0)
    return local_update(model, torch.zeros(SIZE), share_of(run, client), settings=how, source=secure_source())


def test_an_order_comes_back_as_a_reply_that_the_server_can_read() -> None:
    run = run_of(*OFF, "training.batch_size=1000")
    reply = send(ordered(run))
    assert not reply.has_error()
    read = decode_reply(reply.content, round_number=1, num_params=SIZE)
    assert torch.allclose(read.update, update_of(run, 1), atol=1e-6)
    assert (read.below, read.epsilon_example) == (True, 0.0)


def test_on_a_real_node_the_client_that_an_order_names_is_not_obeyed(tmp_path: Path) -> None:
    run = run_of(*OFF, "training.batch_size=1000")
    read = decode_reply(send(ordered(run, 3, tmp_path / "run")).content, round_number=1, num_params=SIZE)
    assert torch.allclose(read.update, update_of(run, 1), atol=1e-6)
    assert not torch.allclose(read.update, update_of(run, 3), atol=1e-6)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("_simulation")
def test_in_a_simulation_it_is_obeyed(tmp_path: Path) -> None:
    run = run_of(*OFF, "training.batch_size=1000")
    read = decode_reply(send(ordered(run, 3, tmp_path), node={}).content, round_number=1, num_params=SIZE)
    assert torch.allclose(read.update, update_of(run, 3), atol=1e-6)


@pytest.mark.parametrize("ray", [None, SimpleNamespace(is_initialized=lambda: False)])
def test_a_node_where_ray_is_merely_installed_is_no_simulation(
    ray: SimpleNamespace | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert not in_simulation()


def refused(reply: Message) -> str:
    assert reply.has_error()
    assert reply.error.code == REFUSED_CODE
    return str(reply.error.reason)


def test_a_refusal_becomes_an_error_with_its_reason_and_a_line_in_the_clients_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="discreet.client"):
        reason = refused(send(ordered(run_of(*OFF)), node=NODE | {"min-noise-multiplier": 1.0}))
    assert "no guarantee is on" in reason
    assert caplog.messages == [f"refused: {reason}"]


MALFORMED = {
    "nothing": RecordDict(),
    "no parameters": RecordDict({"order": ConfigRecord({"round": 1})}),
    "settings that are no configuration": encode_order(Order(1, 1.0, "{"), parameters_record(torch.zeros(SIZE))),
    "another model's parameters": encode_order(
        Order(1, 1.0, config_to_json(run_of(*OFF))), parameters_record(torch.zeros(SIZE - 1))
    ),
    "arrays of another app": RecordDict({"parameters": ArrayRecord([np.zeros(3)]), "order": ConfigRecord()}),
}


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED.keys())
def test_an_order_that_can_not_be_read_is_refused_and_does_not_end_the_client(content: RecordDict) -> None:
    assert refused(send(content))


def test_a_ledger_that_can_not_be_used_is_refused_without_naming_the_file(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    path.write_bytes(b"no database, and long enough to be looked at as one" * 40)
    reason = refused(send(ordered(run_of(*EXAMPLE)), node=NODE | {"ledger": str(path)}))
    assert reason == "the ledger of this client can't be used"


def test_the_words_of_an_unforeseen_failure_stay_with_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> torch.Tensor:
        raise ValueError("the target 7 of owner/data.csv is out of range")

    monkeypatch.setattr(client_app.client, "local_update", fails)
    reply = send(ordered(run_of(*OFF)))
    assert reply.has_error()
    assert reply.error.code != REFUSED_CODE
    assert "7" not in str(reply.error.reason)
    assert "owner" not in str(reply.error.reason)


def test_a_client_that_is_asked_to_evaluate_refuses() -> None:
    assert "not private" in refused(send(ordered(run_of(*OFF)), "evaluate"))


@pytest.mark.parametrize(("owner", "counted"), [({}, 400), ({"public-num-examples": 800}, 800)])
def test_a_real_node_goes_by_the_number_that_was_declared(owner: Node, counted: int, tmp_path: Path) -> None:
    run = run_of(*EXAMPLE, "data.public_num_examples=400")
    DurableLedger.create(tmp_path / "ledger.db")
    reply = send(ordered(run), node=NODE | owner | {"ledger": str(tmp_path / "ledger.db")})
    event = poisson_round_event(4 / counted, noise_multiplier=1.5)
    assert DurableLedger(tmp_path / "ledger.db").spent("example").entries == ((event, counted // 4),)
    assert decode_reply(reply.content, round_number=1, num_params=SIZE).epsilon_example > 0


def test_what_a_node_spent_is_in_its_ledger_and_in_its_reply(tmp_path: Path) -> None:
    DurableLedger.create(tmp_path / "ledger.db")
    reply = send(ordered(run_of(*EXAMPLE)), node=NODE | {"ledger": str(tmp_path / "ledger.db")})
    spent = DurableLedger(tmp_path / "ledger.db").spent("example").epsilon(1e-3)
    assert decode_reply(reply.content, round_number=1, num_params=SIZE).epsilon_example == spent > 0
