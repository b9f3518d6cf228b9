"""A client's work and its app: what it is asked, what it charges before it works, what leaves it,
and what it refuses."""

from __future__ import annotations

import logging
import math
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

import discreet.node.client
from client_app.client_app import app
from discreet.accounting.accounting import epsilon_spent
from discreet.accounting.events import poisson_round_event
from discreet.flower.serving import decode_reply, encode_request, parameters_record
from discreet.flower.simulated_nodes import leave_ticket
from discreet.ledger.charges import LedgerError
from discreet.ledger.durable_ledger import DurableLedger
from discreet.models.models import build_model
from discreet.node.account import Refused
from discreet.node.app import DPClient
from discreet.node.client import Client
from discreet.node.nodes import share_of
from discreet.node.policy import ClientPolicy
from discreet.node.work import work_of
from discreet.privacy.randomness import secure_source
from discreet.protocol.masked_messages import WHO, masking_record
from discreet.protocol.messages import (
    MASKING,
    REFUSED_CODE,
    MalformedMessage,
    TrainReply,
    TrainRequest,
    VirtualClient,
    request_items,
)
from discreet.settings.settings import Settings, client_settings
from discreet.training.local_training import LocalSettings, local_update
from tests.node.clients import (
    EXAMPLE,
    LOCAL,
    OFF,
    SIZE,
    client,
    config,
    examples,
    ledger_at,
    linear,
    params_of,
    request,
)

DECLARED = (*EXAMPLE, "data.public_num_examples=16")
accounted = pytest.mark.parametrize("words", [EXAMPLE, LOCAL], ids=["example", "local"])


def work(who: Client, run: Settings, number: int = 1, **more: float) -> TrainReply:
    return who.answer(work_of(request(run, number, **more)), params_of(linear()))


def test_the_update_is_clipped_and_the_bit_says_whether_it_had_to_be() -> None:
    run = config(*OFF)
    free = work(client(examples(9)), run)
    norm = float(free.update.norm())
    clipped = work(client(examples(9)), run, clip_norm=norm / 2)
    assert (free.below, clipped.below) == (True, False)
    assert torch.allclose(clipped.update, free.update / 2, rtol=1e-4)
    assert work(client(examples(9)), run, clip_norm=norm * 1.01).below is True


@accounted
def test_the_charge_is_on_disk_before_any_work_is_done(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "ledger.db", []

    def spy(*_: object, **__: object) -> torch.Tensor:
        seen.append(len(DurableLedger(path).releases()))
        return torch.zeros(SIZE)

    monkeypatch.setattr(discreet.node.client, "local_update", spy)
    work(client(examples(9), path), config(*words))
    assert seen == [1]


def test_a_charge_that_fails_lets_nothing_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> bool:
        raise LedgerError("the disk is full")

    monkeypatch.setattr(DurableLedger, "charge", full)
    with pytest.raises(LedgerError):
        work(client(examples(9), tmp_path / "ledger.db"), config(*EXAMPLE))


@accounted
def test_a_client_without_a_ledger_refuses_what_it_would_have_to_account(
    words: tuple[str, ...],
) -> None:
    with pytest.raises(Refused, match="client has no ledger"):
        work(client(examples(9)), config(*words))


def test_what_is_reported_is_what_dp_sgd_cost_over_all_rounds(tmp_path: Path) -> None:
    who, run = client(examples(10), tmp_path / "ledger.db"), config(*EXAMPLE)
    spent = [work(who, run, number).epsilon_example for number in (1, 2, 4)]
    # 10 examples in batches of 4: 3 steps a round, each with probability 0.4.
    event = poisson_round_event(0.4, noise_multiplier=1.5)
    assert spent == pytest.approx(
        [epsilon_spent([(event, 3 * n)], delta=1e-3) for n in (1, 2, 3)], rel=1e-6
    )


def test_a_delta_of_one_in_n_examples_is_refused_where_n_is_public(tmp_path: Path) -> None:
    words = EXAMPLE
    run = config(*words, "privacy.delta=0.1", "data.num_clients=2")
    work(client(examples(9), tmp_path / "ledger.db", delta=0.1), run)
    with pytest.raises(Refused, match=r"privacy.delta must be below 1 / n"):
        work(client(examples(10), tmp_path / "ledger.db", delta=0.1), run)
    loose = ClientPolicy(max_epsilon=20.0, max_delta=0.1)
    work(client(examples(9), tmp_path / "other.db", policy=loose), config(*words))
    with pytest.raises(Refused, match=r"max-delta .*below 1 / n"):
        work(client(examples(10), tmp_path / "other.db", policy=loose), config(*words))
    local = config(*LOCAL, "privacy.delta=0.1", "data.num_clients=2")
    for count in (9, 10, 40):
        work(client(examples(count), tmp_path / f"{count}.db", delta=0.1), local)


@pytest.mark.parametrize("count", [0, 9, 40])
def test_with_a_declared_number_the_charge_is_what_ran_whatever_the_client_has(
    count: int, tmp_path: Path
) -> None:
    reply = work(client(examples(count), tmp_path / "ledger.db"), config(*DECLARED))
    # Batches of 4 expected of 16 declared: 4 steps, each with probability 0.25.
    event = poisson_round_event(0.25, noise_multiplier=1.5)
    assert DurableLedger(tmp_path / "ledger.db").spent("example").entries == ((event, 4),)
    assert reply.epsilon_example == pytest.approx(epsilon_spent([(event, 4)], delta=1e-3), rel=1e-6)
    assert float(reply.update.norm()) > 0.01  # without examples it is noise


def test_a_refusal_of_the_policy_charges_nothing(tmp_path: Path) -> None:
    who = client(examples(9), tmp_path / "ledger.db", policy=ClientPolicy(min_noise_multiplier=2.0))
    with pytest.raises(Refused, match=r"noise multiplier of 2; .*example-level one is 1\.5"):
        work(who, config(*EXAMPLE))
    assert DurableLedger(tmp_path / "ledger.db").releases() == []


def test_a_request_beyond_the_planned_rounds_is_refused() -> None:
    with pytest.raises(Refused, match=r"train request .*round 5, .*rounds=4"):
        work(client(examples(9)), config(*OFF), 5)


def test_parameters_of_another_model_are_refused_before_anything_is_charged(tmp_path: Path) -> None:
    who = client(examples(9), tmp_path / "ledger.db")
    with pytest.raises(MalformedMessage, match=r"18 trainable parameters, .*has 17"):
        who.answer(work_of(request(config(*EXAMPLE))), torch.zeros(17))
    assert DurableLedger(tmp_path / "ledger.db").releases() == []


PARAMS = 650
Node = dict[str, bool | float | int | str]

NODE: Node = {"partition-id": 1, "num-partitions": 4}


def run_of(*words: str) -> Settings:
    # Full batches: the update follows from the data alone.
    return config(
        *words, "data.name=digits", "data.num_clients=4", "model.name=logistic_regression"
    )


def send(content: RecordDict, kind: str = "train", node: Node = NODE) -> Message:
    message = Message(content, dst_node_id=1, message_type=kind)
    message.metadata.__dict__["_message_id"] = "m1"
    return app(message, Context(1, 1, node, RecordDict(), {}))


def asked(run: Settings, virtual: VirtualClient | None = None, *, size: int = PARAMS) -> RecordDict:
    request = TrainRequest(1, math.inf, client_settings(run), virtual)
    return encode_request(request, parameters_record(torch.zeros(size)))


def update_of(run: Settings, client: int) -> torch.Tensor:
    model = build_model("logistic_regression", (1, 8, 8), 10, seed=3)
    how = LocalSettings(1, 1000, run.training.learning_rate, 0.0)
    return local_update(
        model, torch.zeros(PARAMS), share_of(run.data, client), settings=how, source=secure_source()
    )


def test_a_request_comes_back_as_a_reply_that_the_server_can_read() -> None:
    run = run_of(*OFF, "training.batch_size=1000")
    reply = send(asked(run))
    assert not reply.has_error()
    read = decode_reply(reply.content, round_number=1, num_params=PARAMS)
    assert torch.allclose(read.update, update_of(run, 1), atol=1e-6)
    assert (read.below, read.epsilon_example) == (True, 0.0)


@pytest.mark.parametrize("words", [OFF, EXAMPLE, LOCAL], ids=["off", "example", "local"])
def test_fit_gives_the_update_the_bit_and_what_was_spent_and_no_number_of_examples(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    ledger = ledger_at(tmp_path / "ledger.db").path
    request = request_items(TrainRequest(1, math.inf, client_settings(run_of(*words))))
    arrays, number, said = DPClient(NODE | {"ledger": str(ledger)}).fit(
        [np.zeros(PARAMS, np.float32)], request
    )
    assert [(array.shape, array.dtype.name) for array in arrays] == [((PARAMS,), "float32")]
    assert number == 1
    assert set(said) == {"round", "below", "epsilon_example", "epsilon_local", "epsilon_local_pure"}
    assert (said["round"], said["below"]) == (1, 1)


def test_every_round_of_local_training_is_a_call_of_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        DPClient,
        "fit",
        lambda *_: ([np.full(PARAMS, 2.0, np.float32)], 1, {"round": 1, "below": 0}),
    )
    content = send(asked(run_of(*OFF))).content
    assert {name: value for name, value in content["reply"].items()} == {"round": 1, "below": 0}  # noqa: C416


def test_on_a_real_node_the_client_that_a_request_names_is_not_obeyed(tmp_path: Path) -> None:
    # What Flower's simulation configures, a plain SuperNode may have too: the ticket tells them
    # apart.
    (tmp_path / "other").mkdir()
    left, other = leave_ticket(tmp_path), leave_ticket(tmp_path / "other")
    reasons = set()
    for node, ticket in (
        (NODE, ""),
        ({}, "0" * 64),
        (NODE, other),
        (NODE | {"ledger": "ledger.db"}, left),
    ):
        for folder in (tmp_path, tmp_path / "nothing there"):
            virtual = VirtualClient(3, str(folder), ticket)
            requests = {
                "train": asked(run_of(*OFF), virtual),
                "masking": {MASKING: masking_record(WHO, virtual)},
            }
            for kind, content in requests.items():
                reason = refused(send(RecordDict(dict(content)), node=node))
                assert f"the {kind} request names a virtual client" in reason
                reasons.add(reason)
    assert len(reasons) == 2  # one for each kind, whatever lies at the node


def refused(reply: Message) -> str:
    assert reply.has_error()
    assert reply.error.code == REFUSED_CODE
    return str(reply.error.reason)


def test_a_refusal_becomes_an_error_with_its_reason_and_a_line_in_the_clients_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="discreet.client"):
        reason = refused(send(asked(run_of(*OFF)), node=NODE | {"min-noise-multiplier": 1.0}))
    assert "no guarantee is on" in reason
    assert caplog.messages == [f"refused: {reason}"]


MALFORMED = {
    "nothing": RecordDict(),
    "no parameters": RecordDict({"request": ConfigRecord({"round": 1})}),
    "arrays of another app": RecordDict(
        {"parameters": ArrayRecord([np.zeros(3)]), "request": ConfigRecord()}
    ),
}


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_request_that_can_not_be_read_is_refused_and_does_not_end_the_client(
    content: RecordDict,
) -> None:
    assert refused(send(content))


def test_the_words_of_an_unforeseen_failure_stay_with_the_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object, **__: object) -> torch.Tensor:
        raise ValueError("the target 7 of owner/data.csv is out of range")

    monkeypatch.setattr(discreet.node.client, "local_update", fails)
    reply = send(asked(run_of(*OFF)))
    assert reply.has_error()
    assert reply.error.code != REFUSED_CODE
    assert "7" not in str(reply.error.reason)
    assert "owner" not in str(reply.error.reason)


def test_a_client_asked_to_evaluate_refuses_and_logs_it_if_something_was_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert "not private" in refused(send(RecordDict(), "evaluate"))
    assert "refused" not in caplog.text
    assert "not private" in refused(send(asked(run_of(*OFF)), "evaluate"))
    assert "refused" in caplog.text


@pytest.mark.parametrize(("owner", "counted"), [({}, 400), ({"public-num-examples": 800}, 800)])
def test_a_real_node_goes_by_the_number_that_was_declared(
    owner: Node, counted: int, tmp_path: Path
) -> None:
    run = run_of(*EXAMPLE, "data.public_num_examples=400")
    DurableLedger.create(tmp_path / "ledger.db")
    reply = send(asked(run), node=NODE | owner | {"ledger": str(tmp_path / "ledger.db")})
    event = poisson_round_event(4 / counted, noise_multiplier=1.5)
    assert DurableLedger(tmp_path / "ledger.db").spent("example").entries == (
        (event, counted // 4),
    )
    assert decode_reply(reply.content, round_number=1, num_params=PARAMS).epsilon_example > 0


@pytest.mark.parametrize("kind", ["gaussian", "laplace", "laplace_step"])
@pytest.mark.parametrize("order", [1, -1], ids=["example first", "local first"])
def test_what_an_owner_allows_is_not_spent_once_for_each_guarantee(
    kind: str, order: int, tmp_path: Path
) -> None:
    ledger, full = ledger_at(tmp_path / "ledger.db"), (*OFF, "training.batch_size=1000")
    owner = NODE | {"ledger": str(ledger.path), "max-epsilon": 1.0, "max-delta": 1e-3}
    # 0.77
    example = run_of(*full, "privacy.example.enabled=true", "privacy.example.noise_multiplier=3.2")
    noise = 3.1 if kind == "gaussian" else 1.02  # 0.80, 0.98
    first, second = (
        example,
        run_of(*full, f"privacy.local.kind={kind}", f"privacy.local.noise_multiplier={noise}"),
    )[::order]
    assert not send(asked(first), node=owner).has_error()
    reason = refused(send(asked(second), node=owner))
    assert "budget of max-epsilon, " in reason
    assert len(ledger.releases()) == 1


def no_database(path: Path) -> None:
    path.write_bytes(b"no database, and long enough to be looked at as one" * 40)


def another_schema(path: Path) -> None:
    DurableLedger.create(path)
    with closing(sqlite3.connect(path)) as ledger, ledger:
        ledger.execute("alter table releases rename column count to counts")


@pytest.mark.parametrize("damaged", [no_database, another_schema])
def test_a_ledger_that_can_not_be_used_is_refused_without_naming_the_file(
    damaged: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "ledger.db"
    damaged(path)
    reason = refused(send(asked(run_of(*EXAMPLE)), node=NODE | {"ledger": str(path)}))
    assert reason == "the ledger of this client can't be used"
