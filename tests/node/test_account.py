"""A client's own account: it adds up over rounds and runs, survives the process, and ends at a budget."""

from __future__ import annotations

from pathlib import Path

import pytest
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from discreet.accounting.distributed_gaussian import DistributedDiscreteGaussianDpEvent
from discreet.ledger.durable_ledger import Charge
from discreet.node.account import Accounts, Budget, Refused
from discreet.settings.privacy import EXAMPLE, LOCAL, USER
from tests.node.clients import ledger_at

STEP = PoissonSampledDpEvent(0.25, GaussianDpEvent(1.5))
DELTA = 1e-4


def account(path: Path, *, accountant: str = "pld", delta: float = DELTA) -> Accounts:
    return Accounts(ledger_at(path), delta, accountant)


def charge(
    mine: Accounts, event: DpEvent, count: int, *budgets: Budget, guarantee: str = EXAMPLE, by: str = ""
) -> float:
    """Charges as an admission does, and returns the epsilon spent with it."""
    one = Charge(1, guarantee, by, event, count)
    after = mine.after([one], budgets)
    assert mine.write([one])
    return mine.epsilon(after[guarantee])


def oracle(*events: tuple[DpEvent, int]) -> float:
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    for event, count in events:
        accountant.compose(SelfComposedDpEvent(event, count))
    return float(accountant.get_epsilon(DELTA))


def test_epsilon_is_cumulative_over_runs_with_other_noise(tmp_path: Path) -> None:
    charge(account(tmp_path / "ledger.db"), STEP, 4)
    other = PoissonSampledDpEvent(0.1, GaussianDpEvent(0.9))
    after = charge(account(tmp_path / "ledger.db"), other, 2)
    assert after == pytest.approx(oracle((STEP, 4), (other, 2)), rel=5e-3)


def test_a_charge_that_would_pass_the_budget_is_refused_and_leaves_no_trace(tmp_path: Path) -> None:
    mine, budget = account(tmp_path / "ledger.db"), Budget(oracle((STEP, 10)), DELTA, EXAMPLE)
    charge(mine, STEP, 8, budget)
    head = mine.ledger.position().head
    with pytest.raises(Refused, match=r"the example-level budget is spent: this round would reach epsilon .* of "):
        charge(mine, STEP, 4, budget)
    assert mine.ledger.position().head == head
    assert charge(mine, STEP, 1, budget) <= budget.epsilon


def test_each_budget_holds_at_its_own_delta(tmp_path: Path) -> None:
    # At delta 0.98, which a server may name, the same releases cost next to nothing.
    mine, budgets = account(tmp_path / "ledger.db", delta=0.98), (Budget(4, 0.98), Budget(oracle((STEP, 10)), DELTA))
    assert charge(mine, STEP, 9, *budgets) < 0.1
    with pytest.raises(Refused, match=r"at delta 0\.0001$"):
        charge(mine, STEP, 2, *budgets)


def test_a_masked_sum_counts_for_a_client_whose_data_change_beside_what_is_accounted_for_a_change(
    tmp_path: Path,
) -> None:
    # Zeroing a client out moves the sum by its norm, other data in its place by up to twice as much: noise 2, and 1.
    masked, mine = DistributedDiscreteGaussianDpEvent(100, 1, 25, 3), account(tmp_path / "ledger.db")
    alone, both = (RdpAccountant().compose(GaussianDpEvent(noise)).get_epsilon(DELTA) for noise in (2.0, 1.0))
    charge(mine, masked, 1, Budget(alone * 1.02, DELTA), guarantee=USER)
    with pytest.raises(Refused, match="for all guarantees together"):
        charge(mine, GaussianDpEvent(1e4), 1, Budget(both * 0.98, DELTA), guarantee=LOCAL)
    charge(mine, GaussianDpEvent(1e4), 1, Budget(both * 1.02, DELTA), guarantee=LOCAL)
