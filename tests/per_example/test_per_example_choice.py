"""Models with a layer that has no rule are served by a slower method that is right, or refused; the log says so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn

from discreet.per_example.per_example import clipped_gradient_sum
from tests.per_example.test_per_example_oracle import assert_matches

Model = TypeVar("Model", bound=nn.Module)


def batch(count: int = 6) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(4363)
    return torch.randn(count, 5, generator=draws), torch.randint(0, 3, (count,), generator=draws)


def seeded(build: Callable[[], Model]) -> Model:
    """A model whose weights are the same in every run."""
    with torch.random.fork_rng():
        torch.manual_seed(8123)
        return build()


class Scaled(nn.Module):
    """A parameter that no layer owns, and one that is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(5)), nn.Linear(5, 3)
        self.shift = nn.Parameter(torch.tensor(0.3))

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.layer(inputs * self.scale.exp()) * self.shift
        return logits


class Branching(nn.Module):
    """Control flow that depends on the data: torch.func.vmap cannot follow it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shift = nn.Linear(5, 3), nn.Parameter(torch.zeros(3))

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.layer(inputs)
        return torch.stack([row + self.shift if row.sum() > 0 else row for row in logits])


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    model[0].register_forward_hook(lambda layer, given, outputs: 3.0 * outputs)
    return model


def tied() -> nn.Module:
    layer = nn.Linear(5, 5)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(5, 3))


def normed() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 4)), nn.Linear(4, 3))


class LargestOfABag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.layer = nn.EmbeddingBag(4, 5, mode="max"), nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.layer(self.bag(inputs.clamp(0, 3).long()))
        return logits


@pytest.mark.parametrize("build", [Scaled, hooked, tied, normed])
@pytest.mark.parametrize("order", [1, 2])
def test_parameters_that_no_layer_owns_that_are_used_twice_or_computed_and_hooks_are_right_and_fast(
    build: Callable[[], nn.Module], order: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, (inputs, targets) = seeded(build), batch()
    with caplog.at_level(logging.INFO, logger="discreet"):
        for count in (1, 6):
            assert_matches(model, inputs[:count], targets[:count], clip=0.6, order=order)
    assert not caplog.records


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (Branching, "a loop over examples, slower: unbind takes examples apart"),
        (LargestOfABag, "torch.func, slower: emb"),
    ],
)
@pytest.mark.parametrize("order", [1, 2])
def test_what_can_not_be_watched_is_right_and_said_once(
    build: Callable[[], nn.Module], words: str, order: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, (inputs, targets) = seeded(build), batch()
    with caplog.at_level(logging.INFO, logger="discreet"):
        for count in (1, 6, 6):
            assert_matches(model, inputs[:count], targets[:count], clip=0.6, order=order)
    (record,) = caplog.records
    assert f"by {words}" in record.getMessage()


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Flatten(0), nn.Linear(12, 3)), (2, 6)),
        (nn.Sequential(nn.Conv1d(2, 3, 1), nn.Flatten(), nn.Linear(6, 3)), (2, 6)),
        (nn.Sequential(nn.LayerNorm((2, 6)), nn.Linear(6, 3)), (2, 6)),
    ],
    ids=["flattened", "no batch", "normalised over the batch"],
)
def test_a_layer_that_does_not_see_the_examples_first_is_refused(model: nn.Module, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="can't be called with one example alone"):
        clipped_gradient_sum(model, torch.ones(shape), targets=torch.tensor([0, 1]), clip_norm=1.0)


@pytest.mark.parametrize("training", [True, False])
def test_a_layer_that_has_no_statistics_but_those_of_the_batch_is_refused_in_either_mode(training: bool) -> None:
    model = nn.Sequential(nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 3)).train(training)
    with pytest.raises(ValueError, match=r"mixes examples: use GroupNorm instead \(discreet.to_group_norm makes it\)$"):
        clipped_gradient_sum(model, batch()[0], targets=batch()[1], clip_norm=1.0)
