"""A loop in two processes over gloo: the loop of one process, with each example in one of them and
one noise."""

from __future__ import annotations

import multiprocessing
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, distributed

from discreet import AdaptiveClipping
from discreet.dpsgd.poisson_batches import Processes
from discreet.ledger.budget import BudgetSpent
from discreet.ledger.durable_ledger import DurableLedger
from discreet.privacy.mechanisms import Gaussian
from tests.dpsgd.loops import COUNTED, private
from tests.node.clients import linear, params_of

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "adaptive, in pieces": {"clip_norm": AdaptiveClipping(0.4), "max_physical_batch": 2},
    "secure": {"seed": None},
    "budget": {"seed": None, "max_epsilon": 2.5},
}
DRAW = Gaussian.add_noise
Found = list[dict[str, Any]]


def noted(drawn: list[float], mechanism: Gaussian, *given: Any) -> Tensor:
    drawn.append(mechanism.noise_multiplier)
    return DRAW(mechanism, *given)


def loop_of_one(settings: dict[str, Any], rank: int) -> dict[str, Any]:
    """The parameters after each step, and what this process read and drew."""
    drawn, model = list[float](), linear(seed=rank)
    loop, params = private(model, **settings), list[Tensor]()
    read, spent = list[tuple[int, int]](), False
    with patch.object(Gaussian, "add_noise", lambda *given: noted(drawn, *given)):
        try:
            for inputs, targets in loop:
                places = [int((COUNTED.inputs == row).all(1).nonzero()) for row in inputs]
                read += [(loop.steps_taken, place) for place in places]
                if loop.step(inputs, targets):
                    params.append(params_of(model))
        except BudgetSpent:
            spent = True
    return {"params": torch.stack(params), "drawn": len(drawn), "read": read, "spent": spent}


def one_of_two(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)  # a fork has no other threads
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    found = {
        name: loop_of_one({**how, "distributed": True}, rank)
        for name, how in SETTINGS.items()
        if name != "budget"
    }
    budget = {**SETTINGS["budget"], "distributed": True, "ledger": folder / "ledger.db"}
    torch.save({**found, "budget": loop_of_one(budget, rank)}, folder / f"{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("processes")
    DurableLedger.create(folder / "ledger.db")
    context = multiprocessing.get_context("fork")
    running = [context.Process(target=one_of_two, args=(rank, folder)) for rank in (0, 1)]
    with warnings.catch_warnings():
        # Newer Pythons warn of forks beside threads. These take no lock of this process.
        warnings.simplefilter("ignore", DeprecationWarning)
        for process in running:
            process.start()
    for process in running:
        process.join(120)
    assert [process.exitcode for process in running] == [0, 0]
    spent = DurableLedger(folder / "ledger.db").spent("example").entries
    return [{**torch.load(folder / f"{rank}.pt"), "ledger": spent} for rank in (0, 1)]


@pytest.mark.parametrize("name", ["plain", "adaptive, in pieces"])
def test_two_processes_take_the_steps_of_one(name: str, found: Found) -> None:
    alone = loop_of_one(SETTINGS[name], 0)
    for one in found:
        assert torch.allclose(one[name]["params"], alone["params"], rtol=1e-4, atol=1e-5)
    assert sorted(found[0][name]["read"] + found[1][name]["read"]) == sorted(alone["read"])


@pytest.mark.parametrize("name", SETTINGS)
def test_the_first_process_draws_the_one_noise_and_all_models_stay_equal(
    name: str, found: Found
) -> None:
    first, second = (one[name] for one in found)
    assert torch.equal(first["params"], second["params"])
    steps = len(first["params"])
    assert (first["drawn"], second["drawn"]) == (2 * steps if "adaptive" in name else steps, 0)
    assert steps > 0


@pytest.mark.parametrize("name", SETTINGS)
def test_each_example_of_a_batch_is_in_one_process(name: str, found: Found) -> None:
    places = Counter([*found[0][name]["read"], *found[1][name]["read"]])
    assert set(places.values()) == {1}
    assert 0 < len(places) < 130  # 64 of 240 expected: others have a chance below 1e-9


def test_a_loop_of_its_own_among_other_processes_says_what_its_epsilon_is_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    private(linear())
    before = len(caplog.messages)
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    private(linear())
    assert [said for said in caplog.messages[before:] if "cost more together" in said]
    assert not [said for said in caplog.messages[:before] if "cost more together" in said]


def test_a_process_with_only_a_part_of_the_data_set_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Second(Processes):
        def first(self, make: Any) -> Any:
            return replace(make(), num_examples=60)

    monkeypatch.setattr("discreet.dpsgd.dpsgd.processes_of", lambda _: Second(1, 2))
    with pytest.raises(ValueError, match=r"needs all 60 .*not 30"):
        private(linear(), distributed=True)


def test_a_process_with_another_number_of_rows_per_owner_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Second(Processes):
        def first(self, make: Any) -> Any:
            found = make()
            return 3 if found == 2 else found

    monkeypatch.setattr("discreet.dpsgd.dpsgd.processes_of", lambda _: Second(1, 2))
    owners = [place // 3 for place in range(30)]
    with pytest.raises(ValueError, match=r"rows_per_owner: .* the first one, 3, not 2"):
        private(linear(), distributed=True, owners=owners, rows_per_owner=2)


def test_a_budget_that_is_spent_ends_the_loop_in_both_and_each_step_is_charged_once(
    found: Found,
) -> None:
    assert [one["budget"]["spent"] for one in found] == [True, True]
    ((_, count),) = found[0]["ledger"]
    assert 0 < count == len(found[0]["budget"]["params"]) < 8
