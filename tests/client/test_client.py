"""DPClient: what it is asked, what it charges before it works, and what leaves it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import discreet.client.client
from discreet.client.account import Refused
from discreet.client.admission import local_settings
from discreet.client.client import DPClient
from discreet.client.policy import ClientPolicy
from discreet.federated.durable_ledger import DurableLedger, LedgerError
from discreet.federated.messages import MalformedMessage, Scalar, request_items
from discreet.privacy.accounting import epsilon_spent
from discreet.privacy.events import poisson_round_event
from discreet.settings.compose import load_config
from discreet.settings.rules import ConfigError
from discreet.settings.run_config import RunConfig, client_settings
from tests.client.clients import EXAMPLE, LOCAL, OFF, SIZE, client, config, examples, linear, params_of, request

Numbers = dict[str, Scalar]


def fit(who: DPClient, run: RunConfig, number: int = 1, **more: float) -> tuple[list[np.ndarray], int, Numbers]:
    return who.fit([params_of(linear()).numpy()], request_items(request(run, number, **more)))


@pytest.mark.parametrize("count", [0, 1, 9])
def test_the_number_of_examples_that_leaves_is_the_constant_one(count: int) -> None:
    arrays, number, _ = fit(client(examples(count)), config(*OFF))
    assert number == 1
    assert [(array.shape, array.dtype.name) for array in arrays] == [((SIZE,), "float32")]


@pytest.mark.parametrize("words", [OFF, EXAMPLE, LOCAL], ids=["off", "example", "local"])
def test_nothing_leaves_but_the_update_the_bit_and_what_was_spent(words: tuple[str, ...], tmp_path: Path) -> None:
    _, _, numbers = fit(client(examples(9), tmp_path / "ledger.db"), config(*words))
    assert set(numbers) == {"round", "below", "epsilon_example", "epsilon_local", "epsilon_local_pure"}
    assert numbers["round"] == 1
    assert numbers["below"] in (True, False)


def test_the_update_is_clipped_and_the_bit_says_whether_it_had_to_be() -> None:
    run = config(*OFF)
    (whole,), _, free = fit(client(examples(9)), run)
    norm = float(np.linalg.norm(whole))
    (clipped,), _, numbers = fit(client(examples(9)), run, clip_norm=norm / 2)
    assert (free["below"], numbers["below"]) == (True, False)
    assert np.allclose(clipped, whole / 2, rtol=1e-4)
    assert fit(client(examples(9)), run, clip_norm=norm * 1.01)[2]["below"] is True


def test_an_update_that_is_not_finite_leaves_as_zero_and_is_not_below() -> None:
    who, run = client(examples(9)), config(*OFF)
    broken = np.full(SIZE, np.nan, dtype=np.float32)
    arrays, _, numbers = who.fit([broken], request_items(request(run, clip_norm=1.0)))
    assert not arrays[0].any()
    assert numbers["below"] is False


@pytest.mark.parametrize("words", [EXAMPLE, LOCAL], ids=["example", "local"])
def test_the_charge_is_on_disk_before_any_work_is_done(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "ledger.db", []

    def spy(*_: object, **__: object) -> torch.Tensor:
        seen.append(len(DurableLedger(path).releases()))
        return torch.zeros(SIZE)

    monkeypatch.setattr(discreet.client.client, "local_update", spy)
    fit(client(examples(9), path), config(*words))
    assert seen == [1]


@pytest.mark.parametrize("words", [EXAMPLE, LOCAL], ids=["example", "local"])
def test_a_charge_that_fails_lets_nothing_leave(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> bool:
        raise LedgerError("the disk is full")

    monkeypatch.setattr(DurableLedger, "charge_after", full)
    with pytest.raises(LedgerError):
        fit(client(examples(9), tmp_path / "ledger.db"), config(*words))


@pytest.mark.parametrize("words", [EXAMPLE, LOCAL], ids=["example", "local"])
def test_a_client_without_a_ledger_refuses_what_it_would_have_to_account(words: tuple[str, ...]) -> None:
    with pytest.raises(Refused, match="this client has no ledger"):
        fit(client(examples(9)), config(*words))


def test_what_is_reported_is_what_dp_sgd_cost_over_all_rounds(tmp_path: Path) -> None:
    who, run = client(examples(10), tmp_path / "ledger.db"), config(*EXAMPLE)
    spent = [fit(who, run, number)[2]["epsilon_example"] for number in (1, 2, 4)]
    # 10 examples in batches of 4: 3 steps a round, each with probability 0.4.
    event = poisson_round_event(0.4, noise_multiplier=1.5)
    assert spent == pytest.approx([epsilon_spent([(event, 3 * n)], delta=1e-3) for n in (1, 2, 3)], rel=1e-6)


def test_a_client_without_examples_spends_nothing(tmp_path: Path) -> None:
    assert fit(client(examples(0), tmp_path / "ledger.db"), config(*EXAMPLE))[2]["epsilon_example"] == 0
    assert DurableLedger(tmp_path / "ledger.db").releases() == []


@pytest.mark.parametrize("words", [EXAMPLE, LOCAL], ids=["example", "local"])
def test_a_delta_of_one_in_n_examples_is_refused(words: tuple[str, ...], tmp_path: Path) -> None:
    run = config(*words, "privacy.delta=0.1", "data.num_clients=2")
    fit(client(examples(9), tmp_path / "ledger.db", delta=0.1), run)
    with pytest.raises(Refused, match=r"privacy.delta must be below 1 / n"):
        fit(client(examples(10), tmp_path / "ledger.db", delta=0.1), run)


def test_a_policy_whose_delta_is_one_in_n_examples_is_refused(tmp_path: Path) -> None:
    loose = ClientPolicy(max_epsilon=3.0, max_delta=0.1)
    fit(client(examples(9), tmp_path / "ledger.db", policy=loose), config(*EXAMPLE))
    with pytest.raises(Refused, match=r"max-delta of this client's policy must be below 1 / n"):
        fit(client(examples(10), tmp_path / "ledger.db", policy=loose), config(*EXAMPLE))


DECLARED = (*EXAMPLE, "data.public_num_examples=16")


@pytest.mark.parametrize("count", [0, 9, 40])
def test_with_a_declared_number_the_charge_is_what_ran_whatever_the_client_has(count: int, tmp_path: Path) -> None:
    who = client(examples(count), tmp_path / "ledger.db")
    _, _, numbers = fit(who, config(*DECLARED))
    # Batches of 4 expected of 16 declared: 4 steps, each with probability 0.25.
    event = poisson_round_event(0.25, noise_multiplier=1.5)
    assert DurableLedger(tmp_path / "ledger.db").spent("example").entries == ((event, 4),)
    assert numbers["epsilon_example"] == pytest.approx(epsilon_spent([(event, 4)], delta=1e-3), rel=1e-6)


def test_with_a_declared_number_a_client_without_examples_sends_noise(tmp_path: Path) -> None:
    reply = client(examples(0), tmp_path / "ledger.db").answer(request(config(*DECLARED)), params_of(linear()))
    assert float(reply.update.norm()) > 0.01


def test_with_a_declared_number_delta_is_compared_with_it_and_not_with_what_the_client_has(tmp_path: Path) -> None:
    run = config(*DECLARED, "privacy.delta=0.06")
    fit(client(examples(40), tmp_path / "ledger.db", delta=0.06), run)


@pytest.mark.parametrize("words", [EXAMPLE, DECLARED], ids=["the run declares none", "the run declares another"])
def test_the_number_that_an_owner_declares_goes_before_the_runs(words: tuple[str, ...], tmp_path: Path) -> None:
    who = client(examples(9), tmp_path / "ledger.db", policy=ClientPolicy(public_num_examples=40))
    fit(who, config(*words))
    event = poisson_round_event(0.1, noise_multiplier=1.5)
    assert DurableLedger(tmp_path / "ledger.db").spent("example").entries == ((event, 10),)


def test_a_declared_number_that_does_not_go_with_the_run_is_refused_and_nothing_is_charged(tmp_path: Path) -> None:
    who = client(examples(9), tmp_path / "ledger.db", policy=ClientPolicy(public_num_examples=3))
    with pytest.raises(ConfigError, match=r"data\.public_num_examples must be at least training\.batch_size and"):
        fit(who, config(*EXAMPLE))
    assert DurableLedger(tmp_path / "ledger.db").releases() == []


def test_a_target_is_met_for_the_declared_number() -> None:
    run = config(
        *OFF, "privacy.example.enabled=true", "privacy.example.target_epsilon=2", "data.public_num_examples=16"
    )
    noises = {
        settings.example.noise_multiplier
        for n in (0, 3, 99)
        if (settings := local_settings(client_settings(run), n)).example
    }
    (noise,) = noises
    assert 1.99 < epsilon_spent([(poisson_round_event(0.25, noise_multiplier=noise), 4 * 4)], delta=1e-3) <= 2


def test_a_refusal_of_the_policy_charges_nothing(tmp_path: Path) -> None:
    who = client(examples(9), tmp_path / "ledger.db", policy=ClientPolicy(min_noise_multiplier=2.0))
    with pytest.raises(Refused, match=r"requires a noise multiplier of 2; the example-level one is 1\.5"):
        fit(who, config(*EXAMPLE))
    assert DurableLedger(tmp_path / "ledger.db").releases() == []


def test_the_owners_budget_ends_the_clients_work(tmp_path: Path) -> None:
    who = client(examples(10), tmp_path / "ledger.db", policy=ClientPolicy(max_epsilon=3.0, max_delta=1e-3))
    spent = [fit(who, config(*EXAMPLE), number)[2]["epsilon_example"] for number in (1, 2)]
    with pytest.raises(
        Refused, match=r"the budget of max-epsilon.* is spent: this round would reach epsilon 3\.01 of 3"
    ):
        fit(who, config(*EXAMPLE), 3)
    assert DurableLedger(tmp_path / "ledger.db").spent("example").epsilon(1e-3) == spent[-1]


def test_a_request_beyond_the_planned_rounds_is_refused() -> None:
    with pytest.raises(Refused, match="the train request is for round 5, and the run has rounds=4"):
        fit(client(examples(9)), config(*OFF), 5)


def test_parameters_of_another_model_are_refused_before_anything_is_charged(tmp_path: Path) -> None:
    who = client(examples(9), tmp_path / "ledger.db")
    with pytest.raises(MalformedMessage, match="has 18 trainable parameters, the train request holds 17"):
        who.fit([np.zeros(17, dtype=np.float32)], request_items(request(config(*EXAMPLE))))
    assert DurableLedger(tmp_path / "ledger.db").releases() == []


def test_loss_and_accuracy_are_not_given() -> None:
    with pytest.raises(Refused, match="not private"):
        client(examples(9)).evaluate([params_of(linear()).numpy()], {})


def test_a_target_chooses_the_noise_for_taking_part_in_every_round(tmp_path: Path) -> None:
    words = ["privacy.example.enabled=true", "privacy.example.target_epsilon=2"]
    run = config(*OFF, *words)
    settings = local_settings(client_settings(run), 10)
    assert settings.example is not None
    event = poisson_round_event(0.4, noise_multiplier=settings.example.noise_multiplier)
    assert 1.99 < epsilon_spent([(event, 3 * 4)], delta=1e-3) <= 2
    who = client(examples(10), tmp_path / "ledger.db")
    assert all(float(str(fit(who, run, number)[2]["epsilon_example"])) <= 2 for number in range(1, 5))
    with pytest.raises(Refused):
        fit(who, run, 4)


def test_local_noise_is_on_what_is_clipped_for_the_server(tmp_path: Path) -> None:
    run = config(*LOCAL, "privacy.local.clip_norm=1e-6")
    noisy = client(examples(9), tmp_path / "a.db").answer(request(run), params_of(linear()))
    quiet = client(examples(0), tmp_path / "b.db").answer(request(run), params_of(linear()))
    # The same draws: what differs is the update, clipped to clip_norm before the noise.
    assert float((noisy.update - quiet.update).norm()) <= 1.01e-6
    assert float(quiet.update.norm()) > 2e-6


def test_a_target_with_a_list_of_shares_for_local_noise_is_calibrated() -> None:
    words = [
        "rounds=2",
        "privacy.user.enabled=false",
        "privacy.example.enabled=true",
        "privacy.example.target_epsilon=3",
    ]
    local_words = ["privacy.local.kind=gaussian", "privacy.local.epsilon=1", "privacy.local.schedule=[1,2]"]
    settings = local_settings(client_settings(load_config([*words, *local_words])), 20)
    assert settings.example is not None
    assert settings.example.noise_multiplier > 0
