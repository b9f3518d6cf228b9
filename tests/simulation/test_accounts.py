"""Many accounts at once are the accounts one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from client_app.account import Budget, ClientAccount, Refused
from discreet.config import RunConfig, load_config
from discreet.federated.durable_ledger import DurableLedger
from discreet.federated.guarantees import EXAMPLE
from discreet.federated.transport import Failure
from discreet.privacy.events import poisson_round_event
from simulation import accounts as accounts_module
from simulation.accounts import Accounts, Admitted, admit
from tests.client_app.clients import ledger_at

EVENT = poisson_round_event(0.2, noise_multiplier=1.1)


def run(*words: str) -> RunConfig:
    work = ("training.epochs=1", "training.batch_size=8")
    return load_config(["privacy.example.enabled=true", "privacy.example.noise_multiplier=1.1", *work, *words])


def accounts(folder: Path) -> Accounts:
    return Accounts(ledger_at(folder / "clients.db"), 1e-3, "pld")


def enter(
    folder: Path, clients: list[int], sizes: list[int], *words: str, number: int = 1
) -> tuple[Admitted, list[Failure]]:
    return admit(run(*words), clients, sizes, accounts=accounts(folder), local=None, round_number=number)


def test_epsilon_is_that_of_the_clients_own_account(tmp_path: Path) -> None:
    many = accounts(tmp_path)
    one = ClientAccount(ledger_at(tmp_path / "one.db"), "7", 1e-3, "pld")
    for number in (1, 2):
        spent = many.charge(EXAMPLE, 7, EVENT, count=5, round_number=number, budgets=())
        alone = one.charge(EXAMPLE, EVENT, count=5, round_number=number, budgets=())
        assert many.epsilon(spent) == pytest.approx(alone)


def test_nothing_is_on_disk_before_the_flush_and_everything_after(tmp_path: Path) -> None:
    many = accounts(tmp_path)
    for client in range(5):
        many.charge(EXAMPLE, client, EVENT, count=1, round_number=1, budgets=())
    assert many.ledger.holders(EXAMPLE) == []
    many.flush()
    assert sorted(many.ledger.holders(EXAMPLE)) == ["0", "1", "2", "3", "4"]


def test_a_resumed_simulation_reads_what_was_spent(tmp_path: Path) -> None:
    first = enter(tmp_path, [3], [9])[0].epsilon_example
    again = enter(tmp_path, [3], [9], number=2)[0].epsilon_example
    assert again > first > 0


def test_a_refused_client_is_charged_nothing(tmp_path: Path) -> None:
    many = accounts(tmp_path)
    with pytest.raises(Refused, match="example-level budget is spent"):
        many.charge(EXAMPLE, 1, EVENT, count=1000, round_number=1, budgets=[Budget(0.5, 1e-3)])
    many.flush()
    assert many.ledger.releases() == []


def test_charges_are_on_disk_before_anybody_works(tmp_path: Path) -> None:
    admitted, failures = enter(tmp_path, [4, 2], [9, 5])
    assert admitted.clients == (4, 2)
    assert failures == []
    ledger = DurableLedger(tmp_path / "clients.db")
    assert [(row.holder, row.count) for row in ledger.releases()] == [("4", 2), ("2", 1)]


def test_some_refuse_and_the_others_work(tmp_path: Path) -> None:
    once = enter(tmp_path, [0], [40])[0].epsilon_example
    words = f"privacy.example.max_epsilon={once}"
    admitted, failures = enter(tmp_path, [0, 1], [40, 40], words, number=2)
    assert admitted.clients == (1,)
    assert [failure.client for failure in failures] == [0]


def test_the_largest_epsilon_is_reported(tmp_path: Path) -> None:
    enter(tmp_path, [0], [9])
    alone, both = enter(tmp_path, [1], [9], number=2)[0], enter(tmp_path, [0, 2], [9, 9], number=2)[0]
    assert both.epsilon_example > alone.epsilon_example


def test_a_client_without_examples_is_charged_nothing_and_takes_part(tmp_path: Path) -> None:
    admitted, _ = enter(tmp_path, [5], [0])
    assert (admitted.clients, admitted.epsilon_example) == ((5,), 0.0)
    assert DurableLedger(tmp_path / "clients.db").releases() == []


def test_with_a_declared_number_everybody_is_charged_alike(tmp_path: Path) -> None:
    enter(tmp_path, [5, 6], [0, 90], "data.public_num_examples=40")
    ledger = DurableLedger(tmp_path / "clients.db")
    assert [ledger.spent(EXAMPLE, holder=name).entries for name in ("5", "6")] == [((EVENT, 5),)] * 2


def test_without_a_ledger_nobody_spends() -> None:
    admitted, failures = admit(run(), [1], [5], accounts=None, local=None, round_number=1)
    assert admitted.clients == ()
    assert "no ledger" in failures[0].reason


def test_what_is_forgotten_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts_module, "REMEMBERED", 1)
    many, found = accounts(tmp_path), []
    for number in range(1, 4):
        admitted, _ = admit(run(), [0, 1], [9, 9], accounts=many, local=None, round_number=number)
        found.append(admitted.epsilon_example)
    assert found == sorted(set(found))
