"""Several optimizers over disjoint parameters of one model, or none: one clipped gradient of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from tests.dpsgd.loops import private, run
from tests.node.clients import linear, params_of


def two(values: Any) -> Any:
    weight, bias = values
    return [SGD([weight], lr=0.3), Adam([bias], lr=0.1)]


def test_each_optimizer_moves_its_own_part_by_the_gradient_of_the_whole() -> None:
    models, both = [linear(), linear(), linear()], {"steps": 1}
    run(private(models[0], lambda values: SGD(values, lr=0.3), **both))
    run(private(models[1], lambda values: Adam(values, lr=0.1), **both))
    run(private(models[2], two, **both))
    assert torch.equal(params_of(models[2])[:15], params_of(models[0])[:15])
    assert torch.equal(params_of(models[2])[15:], params_of(models[1])[15:])


def test_optimizers_that_share_a_parameter_or_leave_one_out_are_refused() -> None:
    with pytest.raises(ValueError, match="two of them hold the same parameter"):
        private(linear(), lambda values: [SGD(list(values), lr=0.1)] * 2)
    with pytest.raises(ValueError, match="does not hold all trainable"):
        private(linear(), lambda values: two(values)[:1])
    with pytest.raises(ValueError, match="not the model's"):
        private(linear(), lambda values: [*two(values), SGD([nn.Parameter(torch.zeros(2))], lr=0.1)])


def test_without_an_optimizer_the_noised_mean_stays_for_one_that_steps_by_itself() -> None:
    own, plain = linear(), linear()
    run(private(plain))
    loop, optimizer = private(own, lambda _: []), SGD(own.parameters(), lr=0.3)
    for batch in loop:
        if loop.step(*batch):
            optimizer.step()
    assert torch.equal(params_of(own), params_of(plain))
