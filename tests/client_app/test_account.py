"""A client's own account: it adds up over rounds and runs, survives the process, and ends at a budget."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from dp_accounting import DpEvent, GaussianDpEvent, LaplaceDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from client_app.account import Budget, ClientAccount, Refused
from discreet.federated.durable_ledger import Charge, DurableLedger
from discreet.federated.guarantees import EXAMPLE, LOCAL
from tests.client_app.clients import ledger_at

STEP = PoissonSampledDpEvent(0.25, GaussianDpEvent(1.5))
DELTA = 1e-4


def account(path: Path, holder: str = "", *, accountant: str = "pld", delta: float = DELTA) -> ClientAccount:
    return ClientAccount(ledger_at(path), holder, delta, accountant)


def oracle(*events: tuple[DpEvent, int]) -> float:
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    for event, count in events:
        accountant.compose(SelfComposedDpEvent(event, count))
    return float(accountant.get_epsilon(DELTA))


def test_epsilon_is_cumulative_over_the_rounds(tmp_path: Path) -> None:
    mine = account(tmp_path / "ledger.db")
    assert mine.epsilon(EXAMPLE) == 0
    spent = [mine.charge(EXAMPLE, STEP, count=4, round_number=number, budgets=()) for number in (1, 2, 5)]
    assert spent == pytest.approx([oracle((STEP, 4)), oracle((STEP, 8)), oracle((STEP, 12))], rel=5e-3)
    assert mine.epsilon(EXAMPLE) == spent[-1]


def test_epsilon_is_cumulative_over_runs_with_other_noise(tmp_path: Path) -> None:
    account(tmp_path / "ledger.db").charge(EXAMPLE, STEP, count=4, round_number=1, budgets=())
    other = PoissonSampledDpEvent(0.1, GaussianDpEvent(0.9))
    after = account(tmp_path / "ledger.db").charge(EXAMPLE, other, count=2, round_number=1, budgets=())
    assert after == pytest.approx(oracle((STEP, 4), (other, 2)), rel=5e-3)


def test_clients_and_guarantees_have_accounts_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "clients.db"
    account(path, "7").charge(EXAMPLE, STEP, count=4, round_number=1, budgets=())
    assert account(path, "8").epsilon(EXAMPLE) == 0
    assert account(path, "7").epsilon(LOCAL) == 0
    assert account(path, "7").epsilon(EXAMPLE) > 0


def test_the_accountant_is_the_one_that_is_named(tmp_path: Path) -> None:
    spent = account(tmp_path / "l.db", accountant="rdp").charge(EXAMPLE, STEP, count=9, round_number=1, budgets=())
    assert spent == pytest.approx(RdpAccountant().compose(SelfComposedDpEvent(STEP, 9)).get_epsilon(DELTA), rel=0.02)


def test_pure_epsilon_adds_up_and_is_infinite_with_gaussian_noise(tmp_path: Path) -> None:
    mine = account(tmp_path / "ledger.db")
    mine.charge(LOCAL, LaplaceDpEvent(4.0), count=1, round_number=1, budgets=())
    mine.charge(LOCAL, LaplaceDpEvent(2.0), count=1, round_number=2, budgets=())
    assert mine.pure_epsilon(LOCAL) == pytest.approx(0.75)
    mine.charge(LOCAL, GaussianDpEvent(2.0), count=1, round_number=3, budgets=())
    assert mine.pure_epsilon(LOCAL) == math.inf


def test_a_charge_that_would_pass_the_budget_is_refused_and_leaves_no_trace(tmp_path: Path) -> None:
    mine, budget = account(tmp_path / "ledger.db"), oracle((STEP, 10))
    mine.charge(EXAMPLE, STEP, count=8, round_number=1, budgets=[Budget(budget, DELTA)])
    head = mine.ledger.mark().head
    with pytest.raises(Refused, match=r"the example-level budget is spent: this round would reach epsilon .* of "):
        mine.charge(EXAMPLE, STEP, count=4, round_number=2, budgets=[Budget(budget, DELTA)])
    assert mine.ledger.mark().head == head
    assert mine.charge(EXAMPLE, STEP, count=1, round_number=3, budgets=[Budget(budget, DELTA)]) <= budget


def test_each_budget_holds_at_its_own_delta(tmp_path: Path) -> None:
    # At delta 0.98, which a server may name, the same releases cost next to nothing.
    mine, owner = account(tmp_path / "ledger.db", delta=0.98), Budget(oracle((STEP, 10)), DELTA)
    assert mine.charge(EXAMPLE, STEP, count=9, round_number=1, budgets=[Budget(4, 0.98), owner]) < 0.1
    with pytest.raises(Refused, match=r"at delta 0\.0001$"):
        mine.charge(EXAMPLE, STEP, count=2, round_number=2, budgets=[Budget(4, 0.98), owner])


def test_noise_of_zero_passes_every_budget(tmp_path: Path) -> None:
    mine, large = account(tmp_path / "l.db"), Budget(1000, DELTA)
    with pytest.raises(Refused, match="epsilon inf of 1000"):
        mine.charge(EXAMPLE, GaussianDpEvent(0.0), count=1, round_number=1, budgets=[large])


def test_a_charge_made_meanwhile_is_seen_before_the_budget_is_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A node that serves two runs: the other one charges between this one's look and its own charge.
    mine, other = account(tmp_path / "ledger.db"), DurableLedger(tmp_path / "ledger.db")
    looks: list[object] = []
    spent = DurableLedger.spent

    def looked(self: DurableLedger, guarantee: str, *, holder: str = "") -> object:
        found = spent(self, guarantee, holder=holder)
        if not looks:
            other.charge([Charge(1, EXAMPLE, "", STEP, 8)])
        looks.append(found)
        return found

    monkeypatch.setattr(DurableLedger, "spent", looked)
    with pytest.raises(Refused):
        mine.charge(EXAMPLE, STEP, count=8, round_number=1, budgets=[Budget(oracle((STEP, 10)), DELTA)])
    assert len(looks) == 2
    assert [release.count for release in mine.ledger.releases()] == [8]
