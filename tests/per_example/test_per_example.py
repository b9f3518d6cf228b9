"""Clipped sums of per-example gradients are those of a loop over examples, and bounded for every
example."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from discreet.layers.recurrent import LSTMLayer
from discreet.per_example.objective import cross_entropy
from discreet.per_example.per_example import clipped_gradient_sum
from tests.per_example.test_per_example_oracle import (
    Loss,
    assert_matches,
    clipped_sum,
    fast_sum,
    single_gradients,
)


def characters() -> nn.Module:
    """A small character model: embedding, LSTM, logits at every position."""
    return nn.Sequential(nn.Embedding(11, 4), LSTMLayer(4, 6), nn.Linear(6, 11))


class Wrapped(nn.Module):
    """The same behind a forward of its own, which no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = characters()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(tokens)


def regression() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))


def convolutions() -> nn.Module:
    first = [nn.Conv2d(1, 16, 8, 2, padding=2), nn.Tanh(), nn.MaxPool2d(2, 1)]
    second = [nn.Conv2d(16, 32, 4, 2), nn.Tanh(), nn.MaxPool2d(2, 1), nn.Flatten()]
    return nn.Sequential(*first, *second, nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10))


def normalised() -> nn.Module:
    layers = [nn.Conv2d(1, 4, 5, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(256, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 10))


IMAGE_MODELS = [regression, perceptron, convolutions, normalised]
TEXT_MODELS = [characters, Wrapped]
Batch = tuple[nn.Module, Tensor, Tensor]


def batch(build: Callable[[], nn.Module], count: int, *, seed: int) -> Batch:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build()
        if build in TEXT_MODELS:
            return model, torch.randint(0, 11, (count, 7)), torch.randint(0, 11, (count, 7))
        return model, torch.randn(count, 1, 28, 28), torch.randint(0, 10, (count,))


@pytest.mark.parametrize("build", [*IMAGE_MODELS, *TEXT_MODELS])
@pytest.mark.parametrize("count", [0, 1, 2, 9])
def test_the_sum_is_that_of_a_loop_over_examples(
    build: Callable[[], nn.Module], count: int
) -> None:
    model, inputs, targets = batch(build, count, seed=3181 + count)
    for clip in (1e-3, 0.7, 1e6):
        assert_matches(model, inputs, targets, clip=clip)


@pytest.mark.parametrize("build", [*IMAGE_MODELS, *TEXT_MODELS])
def test_gradients_are_clipped_in_l1_where_that_is_asked_for(
    build: Callable[[], nn.Module],
) -> None:
    assert_matches(*batch(build, 5, seed=4271), clip=3.0, order=1)


@pytest.mark.parametrize("build", [perceptron, characters])
def test_the_sum_is_that_of_a_loop_in_float64(build: Callable[[], nn.Module]) -> None:
    model, inputs, targets = batch(build, 6, seed=827)
    model, inputs = model.double(), inputs.double() if inputs.is_floating_point() else inputs
    total, norms = fast_sum(model, inputs, targets, clip=0.5)
    wanted, wanted_norms = clipped_sum(single_gradients(model, inputs, targets), 0.5)
    torch.testing.assert_close(total, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norms, wanted_norms, rtol=1e-5, atol=0)


@given(
    removed=st.integers(0, 5),
    clip=st.floats(1e-2, 1e2),
    build=st.sampled_from([convolutions, characters]),
)
@settings(max_examples=12, deadline=None)
def test_removing_an_example_moves_the_sum_by_at_most_the_clip_norm(
    removed: int, clip: float, build: Callable[[], nn.Module]
) -> None:
    model, inputs, targets = batch(build, 6, seed=1847)
    kept = [index for index in range(6) if index != removed]
    total, _ = fast_sum(model, inputs, targets, clip=clip)
    without, _ = fast_sum(model, inputs[kept], targets[kept], clip=clip)
    assert float((total - without).double().norm()) <= clip * (1 + 1e-5)


@pytest.mark.parametrize(
    ("build", "poison"),
    [
        *[
            (build, poison)
            for build in (regression, perceptron)
            for poison in (math.nan, math.inf, 3e38)
        ],
        *[(build, math.nan) for build in (convolutions, normalised)],
    ],
)
def test_an_example_without_a_finite_gradient_counts_as_zero(
    build: Callable[[], nn.Module], poison: float
) -> None:
    model, inputs, targets = batch(build, 5, seed=7351)
    kept = [0, 1, 3, 4]
    inputs[2] = poison
    total, norms = clipped_gradient_sum(model, inputs, targets=targets, clip_norm=0.5)
    wanted, wanted_norms = clipped_gradient_sum(
        model, inputs[kept], targets=targets[kept], clip_norm=0.5
    )
    assert norms[2] == math.inf
    torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(norms[kept], wanted_norms, rtol=1e-4, atol=1e-6)


def test_small_output_gradients_do_not_hide_huge_inputs() -> None:
    # The norm is a product of 1e18 and 1e-24, whose square is below the smallest float32: it must
    # not come out as 0.
    model = nn.Linear(1, 2)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor([55.0, 0.0]))
    inputs, targets = torch.full((2, 1), 1e18), torch.tensor([0, 0])
    total, norms = clipped_gradient_sum(model, inputs, targets=targets, clip_norm=1e-7)
    true = 1e18 * math.exp(-55)
    # what squares may lose is added
    assert all(true <= norm <= 1.3 * true for norm in norms.tolist())
    assert 1.5e-7 <= float(total.double().norm()) <= 2e-7


def test_frozen_parameters_have_no_part() -> None:
    model, inputs, targets = batch(perceptron, 4, seed=409)
    next(model.parameters()).requires_grad_(False)
    total, _ = clipped_gradient_sum(model, inputs, targets=targets, clip_norm=0.3)
    assert len(total) == sum(value.numel() for value in model.parameters()) - 784 * 32
    assert_matches(model, inputs, targets, clip=0.3)
    total, norms = clipped_gradient_sum(
        model.requires_grad_(False), inputs, targets=targets, clip_norm=1.0
    )
    assert total.shape == (0,)
    assert norms.tolist() == [0.0] * 4


@pytest.mark.parametrize("build", [convolutions, characters])
def test_the_model_and_the_generator_are_left_as_they_were(build: Callable[[], nn.Module]) -> None:
    model, inputs, targets = batch(build, 4, seed=6043)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, versions = torch.get_rng_state(), [value._version for value in model.parameters()]
    fast_sum(model, inputs, targets, clip=0.1)
    assert torch.equal(torch.get_rng_state(), state)
    assert [value._version for value in model.parameters()] == versions
    assert all(value.grad is None for value in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._backward_hooks for module in model.modules())


def test_it_works_where_gradients_are_switched_off() -> None:
    model, inputs, targets = batch(perceptron, 4, seed=4591)
    wanted, _ = clipped_gradient_sum(model, inputs, targets=targets, clip_norm=0.1)
    with torch.no_grad():
        total, _ = clipped_gradient_sum(model, inputs, targets=targets, clip_norm=0.1)
    assert torch.equal(total, wanted)
    assert not total.requires_grad


def test_cross_entropy_of_a_sequence_is_the_mean_over_its_positions() -> None:
    outputs = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(31))
    targets = torch.tensor([[0, 1, 2], [4, 4, 0]])
    single = [
        nn.functional.cross_entropy(row.T, wanted)
        for row, wanted in zip(outputs, targets, strict=True)
    ]
    torch.testing.assert_close(cross_entropy(outputs, targets), torch.stack(single))


@pytest.mark.parametrize(
    ("dtype", "count", "loss", "message"),
    [
        (torch.float32, 1, cross_entropy, "equally many"),
        (
            torch.float32,
            2,
            lambda outputs, targets: cross_entropy(outputs, targets).mean(),
            "one value an example",
        ),
        (torch.float16, 2, cross_entropy, "all float32, all float64, or bfloat16"),
    ],
)
def test_what_has_no_clipped_sum_is_refused(
    dtype: torch.dtype, count: int, loss: Loss, message: str
) -> None:
    model, inputs, targets = (
        nn.Linear(2, 2).to(dtype),
        torch.ones(2, 2, dtype=dtype),
        torch.zeros(count).long(),
    )
    with pytest.raises(ValueError, match=message):
        clipped_gradient_sum(model, inputs, targets=targets, clip_norm=1.0, loss=loss)


class Partly(nn.Module):
    """A perceptron with a frozen layer, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.unused = perceptron(), nn.Parameter(torch.ones(5))
        self.layers[1].requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


@pytest.mark.parametrize("built_at_once", [2**26, 1])
@pytest.mark.parametrize("build", [*IMAGE_MODELS, *TEXT_MODELS, Partly])
def test_what_stood_in_the_memory_of_a_sum_does_not_matter(
    build: Callable[[], nn.Module], built_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs, targets = batch(build, 5, seed=3571)
    expected, _ = fast_sum(model, inputs, targets, clip=0.5)
    new_empty = Tensor.new_empty
    monkeypatch.setattr(
        Tensor, "new_empty", lambda *args, **options: new_empty(*args, **options).fill_(math.nan)
    )
    monkeypatch.setattr("discreet.per_example.per_example._BUILT_FLOATS", built_at_once)
    total, _ = fast_sum(model, inputs, targets, clip=0.5)
    torch.testing.assert_close(total, expected)
    assert total.isfinite().all()
