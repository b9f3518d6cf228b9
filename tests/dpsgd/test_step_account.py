"""Steps that are charged in a ledger file: they outlive the loop, add up over loops, and are never forgotten."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from discreet.accounting.events import poisson_round_event
from discreet.accounting.privacy_ledger import PrivacyLedger
from discreet.dpsgd.dpsgd import BatchError
from discreet.ledger.budget import BudgetSpent
from discreet.ledger.durable_ledger import Charge, DurableLedger, LedgerError
from discreet.privacy.mechanisms import Gaussian
from tests.dpsgd.loops import BATCH, NOISE, SIZE, private, run
from tests.node.clients import linear, params_of

EVENT = poisson_round_event(BATCH / SIZE, noise_multiplier=NOISE)


def epsilon(steps: int) -> float:
    return PrivacyLedger(((EVENT, steps),)).epsilon(1e-3)


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return DurableLedger.create(tmp_path / "ledger.db").path


def test_two_loops_on_one_ledger_add_up(ledger: Path) -> None:
    run(private(linear(), ledger=ledger))
    second = private(linear(), ledger=str(ledger))
    assert second.epsilon() == epsilon(8)
    assert run(second).epsilon() == epsilon(16)
    assert private(linear(), ledger=ledger, data_owner="another").epsilon() == 0
    assert {(row.guarantee, row.data_owner) for row in DurableLedger(ledger).releases()} == {("example", "")}


def test_what_was_spent_before_counts_for_the_budget_and_for_the_target(ledger: Path) -> None:
    run(private(linear(), ledger=ledger))
    with pytest.raises(BudgetSpent, match="step 4 would"):
        run(private(linear(), ledger=ledger, max_epsilon=1.001 * epsilon(11)))
    target = 1.5 * private(linear(), ledger=ledger, accountant="rdp").epsilon()
    loop = private(linear(), ledger=ledger, target_epsilon=target, accountant="rdp")
    assert 0.99 * target < run(loop).epsilon() <= target


@pytest.mark.parametrize("asks", [True, False])
def test_the_budget_is_looked_at_again_if_another_process_has_charged_since(asks: bool, ledger: Path) -> None:
    model = linear()
    loop = private(model, ledger=ledger, max_epsilon=1.001 * epsilon(8))
    batches = iter(loop)
    loop.step(*next(batches))
    DurableLedger(ledger).charge([Charge(1, "example", "", EVENT, 7)])
    assert not asks or loop.epsilon() == epsilon(8)
    before, batch = params_of(model), next(batches)
    with pytest.raises(BudgetSpent, match="step 2 would"):
        loop.step(*batch)
    assert (params_of(model) == before).all()
    assert DurableLedger(ledger).spent("example").entries == ((EVENT, 8),)


def test_a_ledger_that_is_missing_is_an_error_and_not_a_new_one(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="is missing"):
        private(linear(), ledger=tmp_path / "ledger.db")


KILLED = """
import os, signal
from tests.dpsgd.loops import private, run
from tests.node.clients import linear
from discreet.privacy.mechanisms import Gaussian
drawn = Gaussian.add_noise
def last(self, total, sensitivity, source):
    if loop.steps_taken == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return drawn(self, total, sensitivity, source)
Gaussian.add_noise = last
loop = private(linear(), ledger={path!r})
run(loop)
"""


def test_a_step_that_ends_between_its_charge_and_its_noise_is_charged_and_not_taken_up_again(
    ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = private(linear(), ledger=ledger)
    batches = iter(loop)
    inputs, targets = next(batches)
    with monkeypatch.context() as patch:
        patch.setattr(Gaussian, "add_noise", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loop.step(inputs, targets)
    assert DurableLedger(ledger).spent("example").entries == ((EVENT, 1),)
    with pytest.raises(BatchError, match="each one is stepped once"):
        loop.step(inputs, targets)


@pytest.mark.slow
def test_a_step_whose_process_is_killed_before_its_noise_is_drawn_is_charged(ledger: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED.format(path=str(ledger))], env=os.environ, check=False)
    assert ended.returncode == -9
    assert DurableLedger(ledger).spent("example").entries == ((EVENT, 3),)
    assert run(private(linear(), ledger=ledger)).epsilon() == epsilon(11)


def test_a_ledger_that_cannot_be_charged_lets_nothing_out(ledger: Path) -> None:
    model = linear()
    loop, before = private(model, ledger=ledger), params_of(model)
    inputs, targets = next(iter(loop))
    ledger.unlink()
    with pytest.raises(LedgerError):
        loop.step(inputs, targets)
    assert (params_of(model) == before).all()
    assert all(value.grad is None for value in model.parameters())
