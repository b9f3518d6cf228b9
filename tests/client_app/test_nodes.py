"""A real node is who its owner says; a virtual client is who the order says."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from client_app.account import Refused
from client_app.nodes import node_client, share_of, virtual_client
from client_app.policy import ClientPolicy
from discreet.config import RunConfig
from discreet.federated.durable_ledger import CLIENTS_LEDGER, DurableLedger, LedgerError
from tests.client_app.clients import EXAMPLE, LOCAL, OFF, config, ledger_at, order

DIGITS = ("data.name=digits", "data.num_clients=4", "model.name=logistic_regression")
NODE = {"partition-id": 1, "num-partitions": 4}


def run_of(*words: str) -> RunConfig:
    return config(*words, *DIGITS)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool((one == other).all())


def test_a_node_holds_the_share_that_its_owner_named_whatever_client_the_order_names() -> None:
    run = run_of(*OFF)
    asked = replace(order(run), client_id=3, state_folder="somewhere")
    assert same(node_client(asked, run, NODE).examples.inputs, share_of(run, 1).inputs)


def test_a_node_draws_secure_noise_whatever_seed_the_order_names() -> None:
    run = run_of(*OFF, "seed=51407")
    assert node_client(order(run), run, NODE).source.is_secure
    virtual = virtual_client(replace(order(run), client_id=1, state_folder="."), run)
    assert not virtual.source.is_secure


def test_a_node_keeps_its_account_where_its_owner_said(tmp_path: Path) -> None:
    run, path = run_of(*EXAMPLE), tmp_path / "mine" / "ledger.db"
    asked = replace(order(run), state_folder=str(tmp_path / "theirs"))
    ledger_at(path)
    client = node_client(asked, run, NODE | {"ledger": str(path)})
    assert client.account is not None
    assert client.account.ledger.path == path
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize("words", [EXAMPLE, LOCAL], ids=["example", "local"])
def test_a_node_without_a_ledger_refuses_where_it_has_to_account(words: tuple[str, ...]) -> None:
    run = run_of(*words)
    with pytest.raises(Refused, match="this node has no ledger: start it with"):
        node_client(order(run), run, NODE)
    assert node_client(order(run_of(*OFF)), run_of(*OFF), NODE).account is None


def test_a_ledger_that_can_not_be_used_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    path.write_bytes(b"no database, and long enough to be looked at as one" * 40)
    run = run_of(*EXAMPLE)
    with pytest.raises(LedgerError):
        node_client(order(run), run, NODE | {"ledger": str(path)})
    with pytest.raises(LedgerError):
        node_client(order(run), run, NODE | {"ledger": str(path / "below-a-file" / "ledger.db")})


@pytest.mark.parametrize("node", [{}, {"partition-id": 1}, {"partition-id": "1", "num-partitions": 4}])
def test_a_node_that_says_nothing_of_its_data_refuses(node: dict[str, object]) -> None:
    with pytest.raises(Refused, match="this node has no data"):
        node_client(order(run_of(*OFF)), run_of(*OFF), node)


def test_a_node_of_another_federation_refuses() -> None:
    with pytest.raises(Refused, match=r"one of 5 clients, the run has data\.num_clients=4"):
        node_client(order(run_of(*OFF)), run_of(*OFF), {"partition-id": 1, "num-partitions": 5})


def test_the_owners_policy_is_read_from_the_node() -> None:
    client = node_client(
        order(run_of(*OFF)), run_of(*OFF), NODE | {"max-epsilon": 2.0, "max-delta": 1e-5, "require": "user"}
    )
    assert client.policy == ClientPolicy(max_epsilon=2.0, max_delta=1e-5, require=("user",))


def test_a_budget_is_no_more_than_it_says_whatever_delta_the_server_names(tmp_path: Path) -> None:
    # Without a delta of the owner's, a server had 34 rounds of multiplier 1 at delta 0.98 for 4: they cost 41 at 1e-5.
    path = ledger_at(tmp_path / "ledger.db").path
    owner = NODE | {"ledger": str(path), "max-epsilon": 4.0, "max-delta": 1e-5}
    answered = []
    for delta in ("0.2", "1e-5", "1e-9"):
        run = run_of(*LOCAL, "rounds=40", f"privacy.delta={delta}")
        for number in range(1, 6):
            with suppress(Refused):
                node_client(order(run, number), run, owner).answer(order(run, number), torch.zeros(650))
                answered.append((delta, number))
    # Noise multiplier 2: 3.71 after three releases at delta 1e-5, and 4.38 after four.
    assert answered == [("1e-5", 1), ("1e-5", 2), ("1e-5", 3)]


def test_a_policy_that_can_not_be_read_is_a_refusal() -> None:
    with pytest.raises(Refused, match="the policy of this client can't be read: max-delta must be a number"):
        node_client(order(run_of(*OFF)), run_of(*OFF), NODE | {"max-delta": "small"})


def test_a_virtual_client_needs_an_order_that_names_it() -> None:
    with pytest.raises(Refused, match="names no virtual client"):
        virtual_client(order(run_of(*OFF)), run_of(*OFF))


def test_virtual_clients_share_one_ledger_with_an_account_each(tmp_path: Path) -> None:
    run = run_of(*EXAMPLE)
    ledger_at(tmp_path / CLIENTS_LEDGER)
    for number in (0, 2):
        who = virtual_client(replace(order(run), client_id=number, state_folder=str(tmp_path)), run)
        who.answer(order(run), torch.zeros(650))
    assert DurableLedger(tmp_path / CLIENTS_LEDGER).holders("example") == ["0", "2"]


def test_with_a_seed_a_virtual_client_draws_by_round_and_client_alone(tmp_path: Path) -> None:
    run = run_of(*EXAMPLE, "seed=51407")
    ledger_at(tmp_path / CLIENTS_LEDGER)

    def words(client: int, number: int) -> tuple[int, ...]:
        asked = replace(order(run, number), client_id=client, state_folder=str(tmp_path))
        drawn = virtual_client(asked, run).source.words(2)
        return tuple(np.asarray(drawn).tolist())

    assert words(1, 1) == words(1, 1)
    assert len({words(client, number) for client in (0, 1) for number in (1, 2)}) == 4
