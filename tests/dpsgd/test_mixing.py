"""DPSGD refuses, before a step is charged, what would let one example move more than its own clipped gradient."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from discreet.dpsgd.dpsgd import DPSGD, BatchError
from tests.dpsgd.loops import COUNTED, PAIRS, private, run, stacked
from tests.node.clients import linear, params_of

Pairs = list[tuple[Tensor, Tensor]]


def contrast(outputs: Tensor, targets: Tensor) -> Tensor:
    rows = functional.normalize(outputs, dim=1)
    return functional.cross_entropy(rows @ rows.t(), torch.arange(len(rows)).flip(0), reduction="none")


def assert_refused_at_no_cost(loop: DPSGD, said: str) -> None:
    before = params_of(loop._model)
    with pytest.raises(ValueError, match=said):
        run(loop)
    assert (loop.epsilon(), loop.steps_taken) == (0, 0)
    assert torch.equal(params_of(loop._model), before)


def test_a_loss_that_mixes_the_batch_is_refused_by_the_first_step_and_costs_nothing() -> None:
    assert_refused_at_no_cost(private(linear(), loss=contrast), "loss: the value of an example depends on other")
    assert_refused_at_no_cost(private(linear(), loss=functional.cross_entropy), "one value an example")


def less_the_mean(pairs: Pairs) -> tuple[Tensor, Tensor]:
    inputs, targets = stacked(pairs)
    return inputs - inputs.mean(0), targets


def seldom_mixed_up(pairs: Pairs) -> tuple[Tensor, Tensor]:
    inputs, targets = stacked(pairs)
    share, order = float(np.random.beta(1.0, 1.0)), torch.randperm(len(pairs))
    mixed = share * inputs + (1 - share) * inputs[order]
    return mixed if random.random() < 0.5 else inputs, targets


def by_the_number(pairs: Pairs) -> tuple[Tensor, Tensor]:
    inputs, targets = stacked(pairs)
    return inputs / len(pairs), targets


def of_another(pairs: Pairs) -> tuple[Tensor, Tensor]:
    inputs, targets = stacked(pairs)
    return inputs, targets.roll(1)


@pytest.mark.parametrize("collate", [less_the_mean, seldom_mixed_up, by_the_number, of_another])
def test_a_collate_fn_that_mixes_the_batch_is_refused_before_anything_is_drawn(collate: Any) -> None:
    with pytest.raises(ValueError, match="collate_fn: a row of the batch follows from several examples"):
        private(linear(), dataset=PAIRS, collate_fn=collate)


def test_a_collate_fn_with_a_generator_of_its_own_is_refused_since_nothing_tells_what_it_mixes() -> None:
    own = np.random.default_rng(90217)

    def collate(pairs: Pairs) -> tuple[Tensor, Tensor]:
        inputs, targets = stacked(pairs)
        return inputs + float(own.normal()), targets

    with pytest.raises(ValueError, match="collate_fn: it draws random numbers that the seeds of"):
        private(linear(), dataset=PAIRS, collate_fn=collate)


def sorted_by_length(pairs: Pairs) -> tuple[Tensor, Tensor]:
    return stacked(sorted(pairs, key=lambda pair: float(pair[0].norm())))


def noisy(pairs: Pairs) -> tuple[Tensor, Tensor]:
    inputs, targets = stacked(pairs)
    return inputs + 0.1 * torch.randn(inputs.shape) * (random.random() + np.random.rand()), targets


def padded_before(pairs: Pairs) -> tuple[Tensor, Tensor]:
    lengths = [1 + int(target) for _, target in pairs]
    cut = [
        functional.pad(one[:length], (max(lengths) - length, 0))
        for (one, _), length in zip(pairs, lengths, strict=True)
    ]
    return functional.pad(torch.stack(cut), (5 - max(lengths), 0)), stacked(pairs)[1]


@pytest.mark.parametrize("collate", [sorted_by_length, noisy, padded_before])
def test_sorting_padding_and_noise_for_each_example_are_served_and_draw_nothing_that_is_seen(collate: Any) -> None:
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    loop = private(linear(), dataset=PAIRS, collate_fn=collate)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), str(np.random.get_state())) == states[1:]
    assert run(loop).steps_taken == len(loop)


CHANGES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "in place": lambda inputs, targets: inputs.sub_(inputs.mean(0)),
    "by data": lambda inputs, targets: inputs.data.sub_(inputs.mean(0)),
    "by numpy": lambda inputs, targets: targets.numpy().fill(0),
    "by set": lambda inputs, targets: setattr(inputs, "data", inputs[:2].clone()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_batch_that_was_written_to_without_a_trace_is_refused(change: Callable[[Tensor, Tensor], object]) -> None:
    loop = private(linear())
    inputs, targets = next(iter(loop))
    change(inputs, targets)
    with pytest.raises(BatchError, match="not the batch that was drawn"):
        loop.step(inputs, targets)
    assert loop.epsilon() == 0


def test_values_that_are_not_finite_are_no_change_of_a_batch() -> None:
    inputs = COUNTED.inputs.clone()
    inputs[::3] = float("nan")
    loop = private(linear(), dataset=list(zip(inputs, COUNTED.targets, strict=True)), batch_size=30)
    loop.step(*next(iter(loop)))
    assert loop.steps_taken == 1


def test_a_parameter_group_that_is_added_after_the_start_is_refused_and_costs_nothing() -> None:
    loop = private(linear())
    loop._optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert_refused_at_no_cost(loop, "optimizer: it holds parameters that are not the model's")


def test_a_parameter_that_is_unfrozen_after_the_start_is_refused_unless_the_optimizer_holds_it() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    loop = private(model)
    loop.step(*next(iter(loop)))
    model[0].requires_grad_(True)
    with pytest.raises(ValueError, match="optimizer: it does not hold all trainable parameters"):
        loop.step(*next(iter(loop)))
    loop._optimizers[0].add_param_group({"params": list(model[0].parameters())})
    loop.step(*next(iter(loop)))
