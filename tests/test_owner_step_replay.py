"""Rounds in which clients share a step and the unit is an owner with all rows, replayed with one
owner more or less."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from discreet.data.examples import Examples, concatenated
from discreet.mechanisms.masked_sums import MaskedStep
from discreet.settings.settings import client_settings
from tests import test_shared_step_replay as shared
from tests.node.clients import config, examples, linear
from tests.replay import replay

OWNERS = (
    "privacy.example.unit=owner",
    "privacy.example.rows_per_owner=4",
    "data.partition=owners",
)
RUN = config(*shared.WORDS, *OWNERS)


def owned(data: Examples, rows_each: int = 2) -> Examples:
    return Examples(data.inputs, data.targets, torch.arange(len(data)) // rows_each)


def with_one_more(data: Examples, rows: Examples) -> Examples:
    """A client's examples with one owner more, who has all these rows."""
    assert data.owners is not None
    new = torch.full((len(rows),), int(data.owners.max()) + 1)
    return concatenated([data, rows], torch.cat([data.owners, new]))


OTHERS = [owned(examples(6, seed=1)), owned(examples(3, seed=2), rows_each=1)]
HELD = owned(examples(5, seed=3))
WORST = {
    name: each.subset(torch.zeros(3, dtype=torch.int64)) for name, each in shared.WORST.items()
}
WORST |= {"more rows than are read": examples(9, seed=5), "one row": examples(1, seed=6)}


@pytest.fixture(autouse=True)
def _of_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "RUN", RUN)


@pytest.mark.parametrize("worst", WORST.values(), ids=WORST.keys())
def test_one_owner_more_or_less_moves_a_shared_step_within_its_sensitivity(worst: Examples) -> None:
    there, gone = [*OTHERS, with_one_more(HELD, worst)], [*OTHERS, HELD]
    vector = shared.vector_of_model(linear())
    run = partial(shared.rounds, engine="sequential", model=linear())
    for one, other in ((there, gone), (gone, there)):
        found = replay(run, one, other)
        assert found.faults == ()
        assert len(found.shares) == shared.ROUNDS
        cost = vector.sensitivity_squared / (vector.summands * vector.variance)
        assert found.gaussian_distance <= math.sqrt(shared.ROUNDS * cost) * (1 + 1e-9)


def test_an_owner_of_huge_rows_costs_all_that_the_event_says() -> None:
    worst = WORST["huge and mistaken"]
    run = partial(shared.rounds, engine="sequential", model=linear())
    found = replay(run, [*OTHERS, with_one_more(HELD, worst)], [*OTHERS, HELD])
    assert found.shares[0] == pytest.approx(1.0, rel=2e-3)


def test_the_statement_speaks_of_an_owner_and_not_of_single_rows() -> None:
    said = MaskedStep(client_settings(RUN)).statement()
    assert said.unit == "one owner of one client, with all its rows"
    assert "one owner" in said.adjacency
    assert not any("examples of one person" in each for each in said.not_covered)
