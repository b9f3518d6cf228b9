"""Models without a rule are served by a slower method that is right, or refused; the log says so once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn

from discreet.privacy.ghost import choice
from discreet.privacy.per_example import clipped_gradient_sum, cross_entropy
from tests.privacy.test_per_example_oracle import assert_matches, clipped_sum, single_gradients

Model = TypeVar("Model", bound=nn.Module)


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    """What is logged, with nothing known about any model from other tests."""
    monkeypatch.setattr(choice, "_by_structure", {})
    with caplog.at_level(logging.INFO, logger="discreet"):
        yield caplog


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
        self.scale, self.layer, self.shift = (
            nn.Parameter(torch.ones(5)),
            nn.Linear(5, 3),
            nn.Parameter(torch.tensor(0.3)),
        )

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


class Aliased(nn.Module):
    """A layer that bypasses every interception: it uses a view of the weight that was made beforehand."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.alias = [self.layer.weight.view(3, 5)]

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.linear(inputs, self.alias[0]) + torch.tanh(self.layer(inputs))


class Centred(nn.Module):
    """Subtracts the batch's mean, so that examples change each other's gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.layer(inputs)
        return logits - logits.tanh().mean(0, keepdim=True)


class Overwritten(nn.Module):
    """Changes a layer's inputs after the layer ran: autograd would refuse, and so must we."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.clone()
        first = self.layer(inputs)
        inputs.mul_(2.0)
        logits: Tensor = first + self.other(inputs)
        return logits


SLOWER = [
    (Scaled, "torch.func.vmap"),
    (Branching, "a loop over"),
    (Aliased, "a loop over"),
    (Centred, "torch.func.vmap"),
]


@pytest.mark.parametrize(("build", "words"), SLOWER)
@pytest.mark.parametrize("order", [1, 2])
def test_what_no_rule_covers_is_right_and_said_once(
    build: Callable[[], nn.Module], words: str, order: int, log: pytest.LogCaptureFixture
) -> None:
    model, (inputs, targets) = seeded(build), batch()
    for _ in range(2):
        assert_matches(model, inputs, targets, clip=0.6, order=order)
    assert_matches(seeded(build), inputs, targets, clip=0.6, order=order)
    (record,) = log.records
    assert f"by {words}" in record.getMessage()


def test_overwritten_inputs_are_noticed() -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        clipped_gradient_sum(Overwritten(), batch()[0], targets=batch()[1], l2_norm_clip=1.0)


def test_a_loss_that_uses_the_parameters_is_noticed(log: pytest.LogCaptureFixture) -> None:
    model, (inputs, targets) = seeded(lambda: nn.Linear(5, 3)), batch()

    def decayed(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets) + model.weight.square().sum()

    total, _ = clipped_gradient_sum(model, inputs, targets=targets, l2_norm_clip=0.6, loss=decayed)
    wanted, _ = clipped_sum(single_gradients(model, inputs, targets, loss=decayed), 0.6)
    torch.testing.assert_close(total.double(), wanted, rtol=1e-4, atol=1e-5)
    assert "a loop over examples" in log.text


def test_a_model_that_changes_its_ways_after_its_trial_is_still_right(log: pytest.LogCaptureFixture) -> None:
    model, (inputs, targets) = seeded(Scaled), batch()
    with torch.no_grad():
        model.shift.fill_(1.0)
    plain = model.forward
    model.forward = lambda inputs: model.layer(inputs)  # type: ignore[method-assign]
    assert_matches(model, inputs, targets, clip=0.6)
    assert not log.records
    model.forward = plain  # type: ignore[method-assign]
    assert_matches(model, inputs, targets, clip=0.6)
    assert "a loop over examples" in log.text


def test_a_covered_model_logs_nothing(log: pytest.LogCaptureFixture) -> None:
    assert_matches(nn.Linear(5, 3), *batch(), clip=0.6)
    assert not log.records


def test_replacing_a_layer_is_noticed() -> None:
    model, (inputs, targets) = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), batch()
    assert_matches(model, inputs, targets, clip=0.6)
    model[2] = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    assert_matches(model, inputs, targets, clip=0.6)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(5), nn.InstanceNorm1d(5, track_running_stats=True)])
@pytest.mark.parametrize("training", [True, False])
def test_layers_that_mix_examples_are_refused(layer: nn.Module, training: bool) -> None:
    model = nn.Sequential(layer, nn.Linear(5, 3)).train(training)
    with pytest.raises(ValueError, match="mixes examples"):
        clipped_gradient_sum(model, batch()[0], targets=batch()[1], l2_norm_clip=1.0)


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_embeddings_that_mix_examples_are_refused(options: dict[str, float]) -> None:
    model = nn.Sequential(nn.Embedding(4, 3, **options), nn.Flatten(), nn.Linear(6, 3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mixes examples"):
        clipped_gradient_sum(model, torch.ones(2, 2, dtype=torch.long), targets=torch.tensor([0, 1]), l2_norm_clip=1.0)


class FunctionalDropout(nn.Module):
    """Dropout that no module announces."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.layer(nn.functional.dropout(inputs, 0.5, self.training))
        return logits


RANDOM: list[Callable[[], nn.Module]] = [
    lambda: nn.Sequential(nn.Dropout(), nn.Linear(5, 3)),
    FunctionalDropout,
]


@pytest.mark.parametrize("build", RANDOM)
def test_random_layers_are_refused_in_training_and_served_in_evaluation(
    build: Callable[[], nn.Module],
) -> None:
    model, (inputs, targets) = build(), batch()
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="random numbers"):
        clipped_gradient_sum(model, inputs, targets=targets, l2_norm_clip=1.0)
    assert torch.equal(torch.get_rng_state(), state)
    assert_matches(model.eval(), inputs, targets, clip=0.6)


def test_dropout_switched_on_after_the_trial_is_refused() -> None:
    model, (inputs, targets) = nn.Sequential(nn.Dropout(), nn.Linear(5, 3)).eval(), batch()
    assert_matches(model, inputs, targets, clip=0.6)
    model[0].train()
    with pytest.raises(ValueError, match="random numbers"):
        clipped_gradient_sum(model, inputs, targets=targets, l2_norm_clip=1.0)


def test_a_first_batch_of_one_example_settles_nothing(log: pytest.LogCaptureFixture) -> None:
    model, (inputs, targets) = seeded(Centred), batch()
    assert_matches(model, inputs[:1], targets[:1], clip=0.6)
    assert not log.records
    assert_matches(model, inputs, targets, clip=0.6)
    assert "by torch.func.vmap" in log.text
