"""Rows of a batch that share memory, and a forward that writes into them: each example sees its own
row alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from discreet.data.examples import Examples
from discreet.per_example.per_example import clipped_gradient_sum
from discreet.training.failing_units import rows_of
from tests.per_example.test_left_behind import CLIP, classes, rows
from tests.per_example.test_per_example_choice import seeded

COUNT, WIDTH = 24, 6


class Bounded(nn.Module):
    """Raises states in place to at least the size of the inputs; twice gives the same."""

    def __init__(self, *, asks: bool) -> None:
        super().__init__()
        self.asks = asks  # whether examples go one after the other
        self.layer, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, inputs: Tensor, states: Tensor) -> Tensor:
        states.clamp_(min=inputs.abs())
        if self.asks and float(inputs.sum()) > 1e9:
            raise ValueError("it reads a number of the inputs")
        return self.last(torch.tanh(self.layer(inputs)) / (1 + states))  # type: ignore[no-any-return]


def expanded(_: Tensor) -> Tensor:
    return torch.zeros(1, WIDTH).expand(COUNT, WIDTH)


def windows(_: Tensor) -> Tensor:
    return torch.zeros(COUNT + WIDTH).unfold(0, WIDTH, 1)[:COUNT]


def one_row_on(held: Tensor) -> Tensor:
    return held[1:]


def apart(_: Tensor) -> Tensor:
    return torch.zeros(COUNT, WIDTH)


def total(asks: bool, states_of: Callable[[Tensor], Tensor], outlier: float) -> Tensor:
    held = torch.cat([rows(), torch.zeros(1, WIDTH)])
    held[1] *= outlier
    model = seeded(lambda: Bounded(asks=asks))
    batch = held[:-1], states_of(held)
    found, _ = clipped_gradient_sum(model, batch, targets=classes(), clip_norm=CLIP)
    return found


def alone(states_of: Callable[[Tensor], Tensor]) -> Tensor:
    """The sum of clipped gradients of examples in memory of their own."""
    held = torch.cat([rows(), torch.zeros(1, WIDTH)])
    model = seeded(lambda: Bounded(asks=False))
    states, targets, parts = states_of(held).clone(), classes(), list[Tensor]()
    for place in range(COUNT):
        outputs = model(held[[place]], states[[place]].clone())
        loss = nn.functional.cross_entropy(outputs, targets[[place]])
        grads = torch.autograd.grad(loss, list(model.parameters()))
        flat = torch.cat([grad.flatten() for grad in grads])
        parts.append(flat * min(1.0, CLIP / float(flat.norm())))
    return torch.stack(parts).sum(0)


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("states_of", [expanded, windows, one_row_on, apart])
def test_a_forward_that_writes_into_a_row_changes_no_other_row(
    states_of: Callable[[Tensor], Tensor], asks: bool
) -> None:
    plain = total(asks, states_of, 1.0)
    torch.testing.assert_close(plain, alone(states_of), rtol=1e-4, atol=1e-5)
    if states_of is not one_row_on:  # there the outlier is the states of the row before it
        moved = total(asks, states_of, 1e4) - plain
        assert 0 < float(moved.norm()) <= 2 * CLIP


def test_each_row_that_is_a_unit_has_memory_of_its_own() -> None:
    data = Examples(torch.zeros(1, WIDTH).expand(COUNT, WIDTH), classes())
    units = list(rows_of(data.inputs, data.targets))
    for inputs, _ in units:
        inputs += 1.0
    assert all(bool((inputs == 1.0).all()) for inputs, _ in units)
    assert not data.inputs.any()
