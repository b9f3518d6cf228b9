"""What items and a collate_fn draw at random: secret, and apart for each item."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from discreet.dpsgd.item_draws import seeded
from discreet.privacy.row_words import RowWords
from tests.dpsgd.loops import CLIP, COUNTED, PAIRS, SIZE, private, run, stacked
from tests.node.clients import linear, params_of

DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(())),
    "random": random.random,
    "numpy": np.random.rand,
}


class Scaled(Dataset[Any]):
    """Rows, each multiplied by a number that is drawn when it is read. The `blank` one is zero, and
    draws nothing."""

    def __init__(self, draw: Callable[[], float], blank: int | None = None) -> None:
        self.draw = draw
        self.blank = blank

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        inputs, target = PAIRS[place]
        if place == self.blank:
            return torch.zeros_like(inputs), target
        return 8 * self.draw() * inputs, target


def known_to_all() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


def batches(dataset: Any, **settings: Any) -> list[Tensor]:
    """The inputs of the first two steps, in which all examples are drawn."""
    usual = {"batch_size": SIZE, "steps": 2}
    loop = private(linear(), dataset=dataset, **(usual | settings))
    known_to_all()
    found = list[Tensor]()
    for inputs, targets in loop:
        found.append(inputs.clone())
        loop.step(inputs, targets)
    return found


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_what_an_item_draws_moves_no_other(draw: Callable[[], float], workers: int) -> None:
    def read(**kind: Any) -> list[Tensor]:
        loader = DataLoader(Scaled(draw, **kind), SIZE, num_workers=workers)
        return batches(loader)

    whole, blank = read(), read(blank=4)
    for one, other in zip(whole, blank, strict=True):
        same = (one == other).all(dim=1)
        assert same.sum() == SIZE - 1
        assert not same[4]


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_an_absent_example_that_draws_moves_the_sum_by_at_most_the_clip_norm(
    draw: Callable[[], float],
) -> None:
    sums = list[Tensor]()
    for first in (0, 1):
        loop = private(linear(), dataset=Scaled(draw), steps=1)
        loop._batches.drawn[0] = torch.arange(first, SIZE)
        known_to_all()
        inputs, targets = next(iter(loop))
        assert len(inputs) == SIZE - first
        sums.append(loop._clipped_sums(inputs, targets, None)[0])
    assert 0 < float((sums[0] - sums[1]).norm()) <= CLIP * (1 + 1e-5)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_seed_that_others_know_does_not_tell_what_items_draw(draw: Callable[[], float]) -> None:
    one, other = (batches(Scaled(draw), seed=None) for _ in range(2))
    assert not torch.equal(one[0], other[0])
    assert not torch.equal(one[0], one[1])


def test_a_loop_with_a_seed_draws_the_same_and_leaves_the_generators_as_they_were() -> None:
    def draw() -> float:
        return sum(each() for each in DRAWS.values())

    models = linear(), linear()
    for model, times in zip(models, (0, 3), strict=True):
        for _ in range(times):
            draw()
        before = states()
        run(private(model, dataset=Scaled(draw), max_physical_batch=7))
        assert states() == before
    assert torch.equal(*map(params_of, models))


def test_two_generators_of_one_algorithm_get_different_seeds() -> None:
    for word in RowWords(bytes(32))(torch.arange(8), 0, 1).flatten().tolist():
        with seeded(word):
            of_numpy: Any = np.random.get_state()
            assert int(of_numpy[1][0]) != torch.initial_seed() % 2**32


def noisy(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    inputs, targets = stacked(pairs)
    return inputs + torch.randn(inputs.shape), targets


def test_a_collate_fn_draws_by_a_secret_seed_of_each_piece() -> None:
    settings: dict[str, Any] = {"collate_fn": noisy, "max_physical_batch": SIZE // 2}
    one, other = (batches(PAIRS, seed=None, **settings) for _ in range(2))
    rows = COUNTED.inputs[: SIZE // 2], COUNTED.inputs[SIZE // 2 :]
    noises = [inputs - rows[at % 2] for found in (one, other) for at, inputs in enumerate(found)]
    assert len(noises) == 8
    for at, noise in enumerate(noises):
        assert not any(torch.allclose(noise, each, atol=1e-3) for each in noises[:at])
    before = states()
    run(private(linear(), dataset=PAIRS, collate_fn=noisy))
    assert states() == before
