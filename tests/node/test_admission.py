"""A cohort is admitted as its clients would be sequentially: what is asked, charged and refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from discreet.accounting.events import poisson_round_event
from discreet.ledger.durable_ledger import Charge, DurableLedger
from discreet.node import account
from discreet.node.account import Accounts, Refused
from discreet.node.admission import Admitted, admit
from discreet.protocol.messages import TrainRequest
from discreet.settings.client_settings import ClientSettings
from discreet.settings.compose import load_config
from discreet.settings.privacy import EXAMPLE
from discreet.settings.settings import client_settings
from tests.node.clients import ledger_at

EVENT = poisson_round_event(0.2, noise_multiplier=1.1)
SHARED = (
    *("privacy.example.aggregation=secure", "privacy.user.enabled=false", "privacy.accountant=rdp"),
    *("sampling.kind=everyone", "data.num_clients=4"),
)
BOTH = ("privacy.user.enabled=false", "privacy.local.kind=gaussian", "privacy.local.noise_multiplier=2")


def run(*words: str) -> ClientSettings:
    work = ("training.epochs=1", "training.batch_size=8")
    words = ("privacy.example.enabled=true", "privacy.example.noise_multiplier=1.1", *work, *words)
    return client_settings(load_config(words))


def ask(*words: str, number: int = 1) -> TrainRequest:
    return TrainRequest(number, 1.0, run(*words))


def accounts(folder: Path) -> Accounts:
    return Accounts(ledger_at(folder / "clients.db"), 1e-3, "pld")


def enter(folder: Path, sizes: dict[str, int], *words: str, number: int = 1) -> dict[str, Admitted | Refused]:
    return admit(ask(*words, number=number), sizes, accounts=accounts(folder))


def spent(found: Admitted | Refused) -> float:
    assert isinstance(found, Admitted)
    return found.epsilon_example


@pytest.mark.parametrize("words", [(), BOTH], ids=["example", "example and local"])
def test_many_clients_at_once_are_admitted_as_sequentially(words: tuple[str, ...], tmp_path: Path) -> None:
    sizes = {"4": 9, "2": 5, "7": 0, "9": 9}
    many, each = accounts(tmp_path / "many"), accounts(tmp_path / "each")
    for number in (1, 2):
        together = admit(ask(*words, number=number), sizes, accounts=many)
        alone = {}
        for name, size in sizes.items():
            alone |= admit(ask(*words, number=number), {name: size}, accounts=each)
        assert together == alone
    rows = [
        [(row.round, row.guarantee, row.data_owner, row.count) for row in who.ledger.releases()] for who in (many, each)
    ]
    assert rows[0] == rows[1]


def test_in_a_shared_step_a_client_may_have_16_batches_of_examples_and_not_one_example_more(tmp_path: Path) -> None:
    found = enter(tmp_path, {"0": 128, "1": 129}, *SHARED)
    assert isinstance(found["0"], Admitted)
    assert "this client has more examples than 16 * training.batch_size=128" in str(found["1"])


def test_a_client_that_one_of_two_budgets_refuses_is_charged_for_neither(tmp_path: Path) -> None:
    found = enter(tmp_path, {"0": 40}, *BOTH, "privacy.local.max_epsilon=0.1")
    assert "the local-level budget is spent" in str(found["0"])
    assert DurableLedger(tmp_path / "clients.db").releases() == []


def test_a_client_without_examples_is_charged_nothing_and_takes_part(tmp_path: Path) -> None:
    assert spent(enter(tmp_path, {"5": 0})["5"]) == 0
    assert DurableLedger(tmp_path / "clients.db").releases() == []


def test_what_is_forgotten_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "REMEMBERED", 1)
    many = accounts(tmp_path)
    found = [spent(admit(ask(number=number), {"0": 9, "1": 9}, accounts=many)["1"]) for number in range(1, 4)]
    assert found == sorted(set(found))


def test_budgets_are_looked_at_again_if_another_run_has_charged_a_client_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = spent(enter(tmp_path / "elsewhere", {"0": 40})["0"])
    many, other = accounts(tmp_path), DurableLedger(tmp_path / "clients.db")
    after = Accounts.after

    def slow(self: Accounts, charges: list[Charge], budgets: object) -> object:
        found = after(self, charges, budgets)  # type: ignore[arg-type]
        if not other.releases():
            other.charge([Charge(1, EXAMPLE, "0", EVENT, 5)])
        return found

    monkeypatch.setattr(Accounts, "after", slow)
    found = admit(ask(f"privacy.example.max_epsilon={once}"), {"0": 40}, accounts=many)
    assert isinstance(found["0"], Refused)
    assert len(other.releases()) == 1
