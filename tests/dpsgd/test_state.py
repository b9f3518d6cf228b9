"""A loop that is saved and loaded, and one that charges a ledger file: its account adds up, and
never shrinks."""

from __future__ import annotations

import copy
import io
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from discreet import AdaptiveClipping
from discreet.accounting.events import poisson_round_event
from discreet.accounting.privacy_ledger import PrivacyLedger
from discreet.dpsgd.dpsgd import DPSGD, BatchError
from discreet.ledger.budget import BudgetSpent
from discreet.ledger.durable_ledger import Charge, DurableLedger, LedgerError
from discreet.privacy.mechanisms import Gaussian
from tests.dpsgd.loops import BATCH, COUNTED, NOISE, SIZE, private, run
from tests.node.clients import linear, params_of

Saved = dict[str, Any]


def stepped(loop: DPSGD, steps: int) -> DPSGD:
    batches = iter(loop)
    for _ in range(steps):
        loop.step(*next(batches))
    return loop


def saved(model: nn.Module, loop: DPSGD) -> Saved:
    """A checkpoint that went through a file."""
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "loop": loop.state_dict()}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(state: Saved, **settings: Any) -> tuple[nn.Module, DPSGD]:
    model = linear(seed=5)
    model.load_state_dict(state["model"])
    loop = private(model, **settings)
    loop.load_state_dict(state["loop"])
    return model, loop


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    return DurableLedger.create(tmp_path / "ledger.db").path


HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "target": {"target_epsilon": 2.0, "accountant": "rdp"},
    "schedules": {
        "noise_multiplier": [2.0] * 4 + [1.0] * 4,
        "clip_norm": lambda step: 0.3 + 0.1 * step,
    },
    "adaptive": {"clip_norm": AdaptiveClipping(0.2)},
}


@pytest.mark.parametrize("settings", HOW.values(), ids=HOW)
def test_a_loop_that_goes_on_from_a_state_is_the_loop_that_never_stopped(
    settings: dict[str, Any],
) -> None:
    never, stops = linear(), linear()
    whole = run(private(never, **settings))
    model, loop = resumed(saved(stops, stepped(private(stops, **settings), 3)), **settings)
    assert loop.steps_taken == 3
    run(loop)
    assert torch.equal(params_of(model), params_of(never))
    assert (loop.epsilon(), loop.clip_norm, loop.steps_taken) == (
        whole.epsilon(),
        whole.clip_norm,
        8,
    )


def test_without_a_ledger_the_steps_of_a_state_stay_spent_and_count_for_the_budget() -> None:
    model, first = linear(), private(linear())
    state = saved(model, stepped(first, 3))
    most = 1.001 * stepped(private(linear()), 5).epsilon()
    _, loop = resumed(state, max_epsilon=most)
    assert loop.epsilon() == first.epsilon()
    with pytest.raises(BudgetSpent, match="step 6 would"):
        run(loop)
    assert loop.steps_taken == 5


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_a_loop_that_resumes_without_its_state_is_refused(momentum: float, ledger: Path) -> None:
    def made(values: Any) -> SGD:
        return SGD(values, lr=0.1, momentum=momentum)

    model = linear()
    first = stepped(private(model, made, seed=None), 3)
    optimizer, state = first._optimizers.all[0], first.state_dict()
    with pytest.raises(ValueError, match="optimizer: it has taken steps"):
        run(private(model, lambda _: optimizer, seed=None))
    loaded = made(model.parameters())
    loaded.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="optimizer: it has taken steps"):
        run(private(model, lambda _: loaded, seed=None))
    again = private(model, lambda _: optimizer, seed=None)
    again.load_state_dict(state)
    assert stepped(again, 1).epsilon() > first.epsilon()
    older = private(model, lambda _: optimizer, seed=None)
    older.load_state_dict(state)
    with pytest.raises(ValueError, match="optimizer: it has taken steps"):
        run(older)
    # loops on a ledger add up
    stepped(private(model, lambda _: optimizer, seed=None, ledger=ledger), 1)


def test_an_older_state_lowers_no_ledger_and_repeated_steps_are_charged_again(
    ledger: Path,
) -> None:
    still: dict[str, Any] = {
        "seed": None,
        "ledger": ledger,
        "made": lambda values: SGD(values, lr=0.0),
    }
    model = linear()
    loop = stepped(private(model, **still), 2)
    state = saved(model, loop)
    stepped(loop, 1)
    after, first = loop.epsilon(), model.weight.grad.clone()
    model, again = resumed(state, **still)
    assert (again.steps_taken, again.epsilon()) == (2, after)
    stepped(again, 1)
    assert again.epsilon() == stepped(private(linear()), 4).epsilon() > after
    assert not torch.equal(model.weight.grad, first)


def test_with_a_seed_a_state_older_than_its_ledger_is_refused(
    ledger: Path,
) -> None:
    model = linear()
    loop = stepped(private(model, ledger=ledger), 2)
    state = saved(model, loop)
    assert resumed(state, ledger=ledger)[1].steps_taken == 2
    stepped(loop, 1)
    with pytest.raises(LedgerError, match="charged since the state"):
        resumed(state, ledger=ledger)


def test_with_a_target_a_state_brings_its_noise_and_the_ledger_what_is_left(ledger: Path) -> None:
    settings: dict[str, Any] = {
        "target_epsilon": 2.0,
        "ledger": ledger,
        "accountant": "rdp",
        "seed": None,
    }
    model = linear()
    loop = stepped(private(model, **settings), 5)
    state = saved(model, loop)
    _, again = resumed(state, **settings)
    assert again.noise_multiplier == loop.noise_multiplier
    assert 0.995 * 2.0 < run(again).epsilon() <= 2.0
    _, late = resumed(state, **settings)
    with pytest.raises(BudgetSpent):
        run(late)


def test_another_ledger_in_place_of_that_of_a_running_loop_ends_it(
    ledger: Path, tmp_path: Path
) -> None:
    loop = stepped(private(linear(), ledger=ledger), 2)
    spent = loop.epsilon()
    kept = ledger.rename(tmp_path / "kept.db")
    DurableLedger.create(ledger)
    with pytest.raises(LedgerError, match="is not the ledger that was read before"):
        loop.epsilon()
    with pytest.raises(LedgerError, match="is not the ledger that was read before"):
        stepped(loop, 1)
    kept.rename(ledger)
    assert loop.epsilon() == spent


def test_a_state_of_another_ledger_of_a_newer_copy_or_of_none_is_refused(
    ledger: Path, tmp_path: Path
) -> None:
    model = linear()
    shutil.copy(ledger, tmp_path / "older.db")
    state = saved(model, stepped(private(model, ledger=ledger), 2))
    other = DurableLedger.create(tmp_path / "other.db").path
    for wrong in (other, tmp_path / "older.db"):
        with pytest.raises(LedgerError, match=r"not the ledger .*or an older copy"):
            resumed(state, ledger=wrong)
    with pytest.raises(LedgerError, match="in a ledger file"):
        resumed(state)
    with pytest.raises(LedgerError, match="is not the ledger"):
        resumed(saved(model, stepped(private(linear()), 2)), ledger=ledger)
    moved = tmp_path / "moved.db"
    ledger.rename(moved)
    assert resumed(state, ledger=moved)[1].steps_taken == 2


OTHERS: dict[str, dict[str, Any]] = {
    "noise_multiplier": {"noise_multiplier": 0.7},
    "clip_norm": {"clip_norm": 0.5},
    "batch_size": {"batch_size": BATCH + 1, "epochs": None, "steps": 8},
    "num_examples": {"dataset": list(zip(COUNTED.inputs[:29], COUNTED.targets, strict=False))},
    "adjacency": {"public_num_examples": 30},
    "delta": {"delta": 1e-4},
    "steps": {"epochs": 3},
    "data_owner": {"data_owner": "others"},
    "target_epsilon": {"target_epsilon": 2.0, "accountant": "rdp"},
}


def test_a_state_of_other_settings_is_refused_by_their_names() -> None:
    model = linear()
    state = saved(model, stepped(private(model), 2))
    for name, settings in OTHERS.items():
        with pytest.raises(ValueError, match=rf"other settings: (.*; )?{name} was"):
            resumed(state, **settings)


@pytest.mark.parametrize("state", [{}, None, linear().state_dict()])
def test_what_is_no_state_of_a_loop_is_told(state: Any) -> None:
    with pytest.raises(ValueError, match=r"give what DPSGD\.state_dict\(\) returned"):
        private(linear()).load_state_dict(state)


def test_a_batch_that_is_drawn_can_be_dropped_neither_by_saving_nor_by_loading() -> None:
    model = linear()
    loop = private(model, max_physical_batch=2)
    state = loop.state_dict()
    batch = next(iter(loop))
    for drops in (loop.state_dict, lambda: loop.load_state_dict(state)):
        with pytest.raises(BatchError, match=r"drawn|begun"):
            drops()
    loop.step(*batch)
    with pytest.raises(BatchError, match="not stepped yet"):
        loop.state_dict()  # amid a batch in pieces
    run(loop)
    with pytest.raises(BatchError, match="has begun"):
        loop.load_state_dict(state)


EVENT = poisson_round_event(BATCH / SIZE, noise_multiplier=NOISE)


def epsilon(steps: int) -> float:
    return PrivacyLedger(((EVENT, steps),)).epsilon(1e-3)


def test_two_loops_on_one_ledger_add_up(ledger: Path) -> None:
    run(private(linear(), ledger=ledger))
    second = private(linear(), ledger=str(ledger))
    assert second.epsilon() == epsilon(8)
    assert run(second).epsilon() == epsilon(16)
    assert private(linear(), ledger=ledger, data_owner="another").epsilon() == 0
    assert {(row.guarantee, row.data_owner) for row in DurableLedger(ledger).releases()} == {
        ("example", "")
    }


def test_what_was_spent_before_counts_for_the_budget_and_for_the_target(ledger: Path) -> None:
    run(private(linear(), ledger=ledger))
    with pytest.raises(BudgetSpent, match="step 4 would"):
        run(private(linear(), ledger=ledger, max_epsilon=1.001 * epsilon(11)))
    target = 1.5 * private(linear(), ledger=ledger, accountant="rdp").epsilon()
    loop = private(linear(), ledger=ledger, target_epsilon=target, accountant="rdp")
    assert 0.99 * target < run(loop).epsilon() <= target


@pytest.mark.parametrize("asks", [True, False])
def test_the_budget_is_looked_at_again_if_another_process_has_charged_since(
    asks: bool, ledger: Path
) -> None:
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


def test_a_step_that_ends_between_charge_and_noise_is_charged_and_not_resumed(
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
    with pytest.raises(BatchError, match="stepped once"):
        loop.step(inputs, targets)


@pytest.mark.slow
def test_a_step_whose_process_is_killed_before_its_noise_is_drawn_is_charged(ledger: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", KILLED.format(path=str(ledger))], env=os.environ, check=False
    )
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


def test_a_batch_that_two_processes_hold_after_a_fork_is_stepped_in_one(ledger: Path) -> None:
    loop = private(linear(), seed=None, ledger=ledger)
    batch = next(iter(loop))
    if os.fork() == 0:
        try:
            loop.step(*batch)
        except RuntimeError as error:
            os._exit(3 * ("in the process that made it" in str(error)))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 3
    assert loop.step(*batch)
    assert DurableLedger(ledger).position().rows == 1


def test_what_is_no_state_is_refused() -> None:
    state = stepped(private(linear()), 2).state_dict()
    for wrong in (None, {}, {"settings": state["settings"]}, [state]):
        with pytest.raises(ValueError, match=r"DPSGD\.state_dict"):
            private(linear()).load_state_dict(wrong)
    for steps in (-1, 10_000):
        with pytest.raises(ValueError, match=rf"steps_taken must be .*not {steps}"):
            private(linear()).load_state_dict(state | {"steps_taken": steps})
    with pytest.raises(ValueError, match="other settings"):
        private(linear()).load_state_dict(state | {"settings": None})


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_loop_is_not_copied_as_its_copy_would_share_the_account(
    copied: Callable[[DPSGD], object],
) -> None:
    loop = private(linear())
    next(iter(loop))
    with pytest.raises(TypeError, match="a DPSGD is not copied or pickled"):
        copied(loop)


@pytest.mark.parametrize("at_first", [True, False])
def test_a_parameter_stays_frozen_or_trainable_through_the_pieces_of_a_batch(
    at_first: bool,
) -> None:
    model = linear()
    parameter = next(model.parameters()).requires_grad_(at_first)
    optimizer = SGD(model.parameters(), lr=0.3)
    loop = private(model, lambda _: optimizer, max_physical_batch=2)
    batches = iter(loop)
    assert not loop.step(*next(batches))
    parameter.requires_grad_(not at_first)
    piece = next(batches)
    with pytest.raises(ValueError, match="frozen or released between pieces of one batch"):
        loop.step(*piece)
    assert loop.steps_taken == 0
    parameter.requires_grad_(at_first)
    while not loop.step(*piece):
        piece = next(batches)
    assert loop.steps_taken == 1
