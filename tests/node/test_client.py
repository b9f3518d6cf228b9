"""A client's work: what it is asked, what it charges before it works, and what leaves it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import discreet.node.client
from discreet.accounting.accounting import epsilon_spent
from discreet.accounting.events import poisson_round_event
from discreet.ledger.durable_ledger import DurableLedger
from discreet.ledger.rollback_guard import LedgerError
from discreet.node.account import Refused
from discreet.node.client import Client
from discreet.node.policy import ClientPolicy
from discreet.protocol.messages import MalformedMessage, TrainReply
from discreet.settings.settings import Settings
from tests.node.clients import EXAMPLE, LOCAL, OFF, SIZE, client, config, examples, linear, params_of, request

DECLARED = (*EXAMPLE, "data.public_num_examples=16")
accounted = pytest.mark.parametrize("words", [EXAMPLE, LOCAL], ids=["example", "local"])


def work(who: Client, run: Settings, number: int = 1, **more: float) -> TrainReply:
    return who.answer(request(run, number, **more), params_of(linear()))


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


def test_a_charge_that_fails_lets_nothing_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> bool:
        raise LedgerError("the disk is full")

    monkeypatch.setattr(DurableLedger, "charge", full)
    with pytest.raises(LedgerError):
        work(client(examples(9), tmp_path / "ledger.db"), config(*EXAMPLE))


@accounted
def test_a_client_without_a_ledger_refuses_what_it_would_have_to_account(words: tuple[str, ...]) -> None:
    with pytest.raises(Refused, match="this client has no ledger"):
        work(client(examples(9)), config(*words))


def test_what_is_reported_is_what_dp_sgd_cost_over_all_rounds(tmp_path: Path) -> None:
    who, run = client(examples(10), tmp_path / "ledger.db"), config(*EXAMPLE)
    spent = [work(who, run, number).epsilon_example for number in (1, 2, 4)]
    # 10 examples in batches of 4: 3 steps a round, each with probability 0.4.
    event = poisson_round_event(0.4, noise_multiplier=1.5)
    assert spent == pytest.approx([epsilon_spent([(event, 3 * n)], delta=1e-3) for n in (1, 2, 3)], rel=1e-6)


@accounted
def test_a_delta_of_one_in_n_examples_is_refused(words: tuple[str, ...], tmp_path: Path) -> None:
    run = config(*words, "privacy.delta=0.1", "data.num_clients=2")
    work(client(examples(9), tmp_path / "ledger.db", delta=0.1), run)
    with pytest.raises(Refused, match=r"privacy.delta must be below 1 / n"):
        work(client(examples(10), tmp_path / "ledger.db", delta=0.1), run)
    loose = ClientPolicy(max_epsilon=20.0, max_delta=0.1)
    work(client(examples(9), tmp_path / "other.db", policy=loose), config(*words))
    with pytest.raises(Refused, match=r"max-delta of this client's policy must be below 1 / n"):
        work(client(examples(10), tmp_path / "other.db", policy=loose), config(*words))


@pytest.mark.parametrize("count", [0, 9, 40])
def test_with_a_declared_number_the_charge_is_what_ran_whatever_the_client_has(count: int, tmp_path: Path) -> None:
    reply = work(client(examples(count), tmp_path / "ledger.db"), config(*DECLARED))
    # Batches of 4 expected of 16 declared: 4 steps, each with probability 0.25.
    event = poisson_round_event(0.25, noise_multiplier=1.5)
    assert DurableLedger(tmp_path / "ledger.db").spent("example").entries == ((event, 4),)
    assert reply.epsilon_example == pytest.approx(epsilon_spent([(event, 4)], delta=1e-3), rel=1e-6)
    assert float(reply.update.norm()) > 0.01  # without examples it is noise


def test_a_refusal_of_the_policy_charges_nothing(tmp_path: Path) -> None:
    who = client(examples(9), tmp_path / "ledger.db", policy=ClientPolicy(min_noise_multiplier=2.0))
    with pytest.raises(Refused, match=r"requires a noise multiplier of 2; the example-level one is 1\.5"):
        work(who, config(*EXAMPLE))
    assert DurableLedger(tmp_path / "ledger.db").releases() == []


def test_a_request_beyond_the_planned_rounds_is_refused() -> None:
    with pytest.raises(Refused, match="the train request is for round 5, and the run has rounds=4"):
        work(client(examples(9)), config(*OFF), 5)


def test_parameters_of_another_model_are_refused_before_anything_is_charged(tmp_path: Path) -> None:
    who = client(examples(9), tmp_path / "ledger.db")
    with pytest.raises(MalformedMessage, match="has 18 trainable parameters, the train request holds 17"):
        who.answer(request(config(*EXAMPLE)), torch.zeros(17))
    assert DurableLedger(tmp_path / "ledger.db").releases() == []
