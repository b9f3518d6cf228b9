"""Layers that draw random numbers draw them for each example by itself, and an example never
changes another's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from discreet.layers.draws import drawn_from, no_draws, own_draws
from discreet.layers.dropping import attended, dropped
from discreet.per_example.objective import cross_entropy
from discreet.per_example.per_example import clipped_gradient_sum, l1_clipped_gradient_sum
from tests.per_example.key_masks import CPU, KEY, Masked
from tests.per_example.test_per_example_oracle import clipped_sum


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Dropout(0.3), nn.Linear(8, 9), nn.ReLU(), nn.AlphaDropout(0.2), nn.Linear(9, 3)
    )


def in_place() -> nn.Module:
    layers = [nn.Linear(8, 9), nn.Hardswish(inplace=True), nn.Dropout(0.3, inplace=True)]
    return nn.Sequential(*layers, nn.Linear(9, 3))


def convolution() -> nn.Module:
    first = [
        nn.Unflatten(1, (2, 2, 2)),
        nn.Conv2d(2, 6, 2),
        nn.Dropout2d(0.4),
        nn.FeatureAlphaDropout(0.2),
    ]
    second = [
        nn.Unflatten(1, (2, 3)),
        nn.Dropout3d(0.2),
        nn.Flatten(2),
        nn.Dropout1d(0.2),
        nn.Flatten(),
    ]
    return nn.Sequential(*first, *second, nn.Linear(6, 3))


def transformer(norm_first: bool = False) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        4, 2, 5, dropout=0.3, batch_first=True, norm_first=norm_first
    )
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Unflatten(1, (2, 4)), encoder, nn.Flatten(), nn.Linear(8, 3))


def transformer_first() -> nn.Module:
    return transformer(norm_first=True)


class Functional(nn.Module):
    """Dropout that no module announces."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(nn.functional.dropout(inputs, 0.5, self.training))


class Looped(Functional):
    """The same with a branch that the data decides."""

    def forward(self, inputs: Tensor) -> Tensor:
        # numbers are drawn as the values ask for them
        often = 2 if self.training and inputs.sum() > 0 else 1
        for _ in range(often):
            kept = nn.functional.dropout(inputs, 0.5, self.training)
        return self.layer(kept)


SEQUENCES = [perceptron, in_place, convolution]
TRANSFORMERS = [transformer, transformer_first]
RULED = [*SEQUENCES, *TRANSFORMERS]
Build = Callable[[], nn.Module]


def seeded(build: Build, count: int = 7) -> tuple[nn.Module, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(2081)
    with torch.random.fork_rng():
        torch.manual_seed(4127)
        return (
            build(),
            torch.randn(count, 8, generator=draws),
            torch.randint(0, 3, (count,), generator=draws),
        )


def masked_gradients(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """(n, num_params): plain autograd of each loss by itself, in one pass over the batch, with the
    masks that `KEY` draws."""
    parameters = list(model.parameters())
    with drawn_from(KEY), own_draws(len(inputs), CPU) as draws, Masked(draws):
        losses = cross_entropy(model(inputs), targets)
    rows = [
        torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
        for loss in losses
    ]
    return torch.stack([torch.cat([value.flatten() for value in row]) for row in rows])


def assert_a_loop_agrees(build: Build, order: int, patched: pytest.MonkeyPatch) -> None:
    """`patched`: what holds for the loop alone."""
    model, inputs, targets = seeded(build)
    clipped = l1_clipped_gradient_sum if order == 1 else clipped_gradient_sum
    gradients = masked_gradients(model, inputs, targets)
    patched.undo()
    with drawn_from(KEY):
        total, norms = clipped(model, inputs, targets=targets, clip_norm=0.8)
    wanted, wanted_norms = clipped_sum(gradients, 0.8, order=order)
    torch.testing.assert_close(norms.double(), wanted_norms, rtol=2e-4, atol=1e-6)
    assert float((total.double() - wanted).norm()) <= 2e-4 * 0.8 * len(inputs)


@pytest.mark.parametrize("build", SEQUENCES)
@pytest.mark.parametrize("order", [1, 2])
def test_the_sum_is_that_of_a_loop_with_the_masks_of_a_plain_pass(
    build: Build, order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_a_loop_agrees(build, order, monkeypatch)


@pytest.mark.parametrize("build", TRANSFORMERS)
@pytest.mark.parametrize("order", [1, 2])
def test_attention_drops_what_a_plain_pass_drops(
    build: Build, order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: None = None,
        dropout_p: float = 0.0,
        *_: bool,
    ) -> Tensor:
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        return nn.functional.dropout(scores.softmax(-1), dropout_p) @ value

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", attention)
    assert_a_loop_agrees(build, order, monkeypatch)


def test_numbers_that_are_drawn_as_the_values_ask_for_them_shift_no_others() -> None:
    """RReLU draws one for each value below zero: the others' masks would depend on an example."""
    model = nn.Sequential(nn.Linear(8, 3), nn.RReLU())
    _, inputs, targets = seeded(perceptron)
    with pytest.raises(ValueError, match="use LeakyReLU or PReLU"):
        clipped_gradient_sum(model, inputs, targets=targets, clip_norm=1.0)
    clipped_gradient_sum(model.eval(), inputs, targets=targets, clip_norm=1.0)


@pytest.mark.parametrize("build", [*RULED, Functional])
def test_an_example_that_is_lost_leaves_the_masks_of_the_others(build: Build) -> None:
    model, inputs, targets = seeded(build)
    poisoned = inputs.clone()
    poisoned[2] = math.nan
    found = []
    with torch.random.fork_rng():
        for batch in (inputs, poisoned):
            torch.manual_seed(77)
            found.append(clipped_gradient_sum(model, batch, targets=targets, clip_norm=0.05))
    (total, norms), (without, others) = found
    assert others[2] == math.inf
    kept = [0, 1, 3, 4, 5, 6]
    torch.testing.assert_close(others[kept], norms[kept])
    assert norms[2] > 0.05  # so that its part of the sum has the norm of the clip
    assert float((total - without).norm()) == pytest.approx(0.05, rel=1e-4)


def dropping(layer: nn.Module) -> Build:
    return lambda: nn.Sequential(nn.Unflatten(1, (8, 1)), layer, nn.Flatten(), nn.Linear(8, 3))


DROPPING = [
    dropping(each)
    for each in (nn.Dropout(), nn.AlphaDropout(), nn.Dropout1d(), nn.FeatureAlphaDropout())
]


@pytest.mark.parametrize("build", [*DROPPING, Functional, Looped])
def test_each_example_has_a_mask_of_its_own(build: Build) -> None:
    model, _, _ = seeded(build)
    inputs, targets = torch.ones(400, 8), torch.zeros(400, dtype=torch.long)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        _, norms = clipped_gradient_sum(model, inputs, targets=targets, clip_norm=1.0)
    # 256 masks: among 400 there are about 202 different ones, less than 150 only in one draw of
    # 1e20.
    assert len(norms.unique()) > (150 if build in (Functional, Looped) else 50)


@pytest.mark.parametrize("build", [*RULED, Functional, Looped])
def test_evaluation_draws_nothing(build: Build) -> None:
    model, inputs, targets = seeded(build)
    state = torch.get_rng_state()
    first, _ = clipped_gradient_sum(model.eval(), inputs, targets=targets, clip_norm=1.0)
    second, _ = clipped_gradient_sum(model, inputs, targets=targets, clip_norm=1.0)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, second)


def ones_dropped(count: int, each: int, p: float) -> Tensor:
    with drawn_from(KEY), own_draws(count, CPU) as draws:
        return dropped("dropout", torch.ones(count, each), p, draws)


def test_dropout_by_16_bits_keeps_its_share_and_the_mean() -> None:
    found = ones_dropped(1000, 1000, 0.3)
    assert found.unique().tolist() == pytest.approx([0.0, 1 / 0.7], rel=1e-4)
    # seven standard deviations of a mean of a million
    assert float(found.mean()) == pytest.approx(1, abs=7 * math.sqrt(0.3 / 0.7) / 1000)


@pytest.mark.parametrize("each", [1, 511, 512, 4096])
@pytest.mark.parametrize("p", [0.1, 8e-6, 1.0])
def test_the_law_of_masks_does_not_depend_on_how_many_numbers_are_drawn(
    each: int, p: float
) -> None:
    scales = {float(ones_dropped(count, each, p).max()) for count in (1, 7, 8, 64)}
    assert scales == ({0.0} if p == 1 else {float(torch.tensor(65536 / round(65536 * (1 - p))))})


HIDDEN = torch.rand(3, 1, 5, 5, generator=torch.Generator().manual_seed(8)) > 0.6
HIDDEN[1, 0, 2] = False
MASKS: list[dict[str, Any]] = [{}, {"is_causal": True}, {"attn_mask": HIDDEN}]
MASKS.append({"attn_mask": torch.zeros(HIDDEN.shape).masked_fill(~HIDDEN, -math.inf)})


@pytest.mark.parametrize("given", MASKS)
def test_attention_with_dropout_is_pytorchs_if_nothing_is_dropped(given: dict[str, Any]) -> None:
    values = torch.randn(3, 3, 2, 5, 4, generator=torch.Generator().manual_seed(9))
    parts = [each.requires_grad_() for each in values.unbind()]
    wanted = nn.functional.scaled_dot_product_attention(*parts, **given, scale=0.3)
    mask, causal = given.get("attn_mask"), given.get("is_causal", False)
    how = {"dropout_p": 0.0, "is_causal": causal, "scale": 0.3}
    found = attended(parts, mask, no_draws(3), how)
    torch.testing.assert_close(found, wanted)
    both = (torch.autograd.grad(each.cos().sum(), parts) for each in (found, wanted))
    torch.testing.assert_close(*both)


def test_attention_drops_what_its_rate_says() -> None:
    query, value = torch.zeros(2, 4, 64, 8), torch.eye(64).expand(2, 4, 64, 64)
    with drawn_from(KEY), own_draws(2, CPU) as draws:
        weights = attended((query, query, value), None, draws, {"dropout_p": 0.25})
    # ten standard deviations of a share of 32,768
    assert float((weights == 0).float().mean()) == pytest.approx(0.25, abs=0.024)
