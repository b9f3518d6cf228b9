"""Masks as indices, padded lists and experts go side by side; what can't is told with its line."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from discreet.per_example.per_example import clipped_gradient_sum
from tests.per_example.notes import Notes
from tests.per_example.test_per_example_choice import seeded
from tests.per_example.test_per_example_oracle import assert_matches, single_gradients

DRAWS = torch.Generator().manual_seed(9127)
SERIES = torch.randn(40, 6, 4, generator=DRAWS)
SERIES *= (torch.arange(6) < torch.randint(1, 7, (40, 1), generator=DRAWS)).unsqueeze(2)
CLASSES = torch.randint(0, 3, (40,), generator=DRAWS)
Forward = Callable[["Masked", Tensor], Tensor]


class Masked(nn.Module):
    """A layer, what a forward does with it, and a head. Steps that are zero are padding."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.run = forward
        self.layer = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.token = nn.Parameter(torch.full((4,), 0.3))
        self.head = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.head(self.run(self, inputs))
        return found


def kept(inputs: Tensor) -> Tensor:
    return inputs.ne(0).any(2)


def mean_of_kept(model: Masked, inputs: Tensor) -> Tensor:
    values = model.layer(inputs)
    return torch.stack([values[at][kept(inputs)[at]].mean(0) for at in range(len(inputs))])


def put_among_zeros(model: Masked, inputs: Tensor) -> Tensor:
    found = torch.zeros(len(inputs), 6, 4)
    found[kept(inputs)] = model.layer(inputs[kept(inputs)])
    return found.mean(1)


def filled_with_a_number(model: Masked, inputs: Tensor) -> Tensor:
    values = model.layer(inputs)
    values[values < 0] = 0.1
    return values.mean(1)  # type: ignore[no-any-return]


def filled_with_a_parameter(model: Masked, inputs: Tensor) -> Tensor:
    values = model.layer(inputs).clone()
    values[~kept(inputs)] = model.token
    return values.mean(1)  # type: ignore[no-any-return]


def of_places(model: Masked, inputs: Tensor) -> Tensor:
    values = model.layer(inputs.sum(1))
    (places,) = torch.where(inputs[:, 0, 0] > 0)
    found = values.clone()
    found[places] = values[places].tanh()
    return found  # type: ignore[no-any-return]


def of_experts(model: Masked, inputs: Tensor) -> Tensor:
    rows = inputs.sum(1)
    found = torch.zeros(len(rows), 4)
    for number, expert in enumerate(model.experts):
        mask = (rows[:, 0] > 0) == bool(number)
        if mask.any():
            found[mask] = expert(rows[mask])
    return found


def padded(model: Masked, inputs: Tensor) -> Tensor:
    rows = []
    for row in model.layer(inputs):
        parts = pad_sequence([row[:2], row[1:]], batch_first=True, padding_value=2.0)
        rows.append(parts.cos().mean((0, 1)))
    return torch.stack(rows)


def biased_attention(model: Masked, inputs: Tensor) -> Tensor:
    values = model.layer(inputs[:, :4])
    bias = model.experts[0].weight
    return functional.scaled_dot_product_attention(values, values, values, bias).mean(1)  # type: ignore[arg-type]


FORWARDS: list[Forward] = [
    biased_attention,
    mean_of_kept,
    put_among_zeros,
    filled_with_a_number,
    filled_with_a_parameter,
    of_places,
    of_experts,
    padded,
]


@pytest.mark.parametrize("forward", FORWARDS)
def test_masks_and_padded_lists_go_side_by_side(
    forward: Forward, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the slow way is an error
    monkeypatch.setattr("discreet.per_example.per_example.built_terms", None)
    assert_matches(seeded(lambda: Masked(forward)), SERIES, CLASSES, clip=0.3)


def test_a_mean_over_the_kept_steps_of_a_whole_batch_is_refused() -> None:
    def mixed(model: Masked, inputs: Tensor) -> Tensor:
        values: Tensor = model.layer(inputs)
        return values.mean(1) - values[kept(inputs)].mean(0)

    with pytest.raises(ValueError, match="mixes examples"):
        assert_matches(seeded(lambda: Masked(mixed)), SERIES, CLASSES, clip=0.3)


def test_autocast_within_a_forward_goes_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    def cast(model: Masked, inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            values = model.layer(inputs).relu()
        return values.float().mean(1)  # type: ignore[no-any-return]

    monkeypatch.setattr("discreet.per_example.per_example.built_terms", None)
    model = seeded(lambda: Masked(cast))
    _, norms = clipped_gradient_sum(model, SERIES, targets=CLASSES, clip_norm=0.3)
    wanted = single_gradients(model, SERIES, CLASSES).norm(dim=1)
    torch.testing.assert_close(norms, wanted, rtol=0.01, atol=1e-3)


class Guess(nn.Module):
    """Its output is a distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Normal:
        return Normal(self.layer(inputs), 2.0, validate_args=False)  # type: ignore[no-untyped-call]


def test_a_distribution_as_the_output_goes_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(outputs: Any, targets: Tensor) -> Tensor:
        return -outputs.log_prob(targets).sum(1)  # type: ignore[no-any-return]

    monkeypatch.setattr("discreet.per_example.per_example.built_terms", None)
    model = seeded(Guess)
    rows, wanted = SERIES.sum(1), SERIES[:, 0, :3]
    gradients = single_gradients(model, rows, wanted, loss=loss)
    total, _ = clipped_gradient_sum(model, rows, targets=wanted, clip_norm=1e6, loss=loss)
    torch.testing.assert_close(total, gradients.sum(0), rtol=1e-4, atol=1e-5)


def drawn_mask(model: Masked, inputs: Tensor) -> Tensor:
    values = model.layer(inputs.sum(1))
    mask = torch.rand(len(inputs)) > 0.5
    found = values.clone()
    found[mask] = values[mask] * 1
    return found  # type: ignore[no-any-return]


def of_its_own_mask(model: Masked, inputs: Tensor) -> Tensor:
    values = model.layer(inputs.sum(1))
    found = values.clone()
    found[values > 0] = values[values > 0] * 2
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("forward", "said"),
    [(drawn_mask, "drawn at random"), (of_its_own_mask, "answers to the mask")],
)
def test_a_mask_that_goes_the_slow_way_is_right_and_is_told_with_its_line(
    forward: Forward, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "discreet"):
        assert_matches(seeded(lambda: Masked(forward)), SERIES, CLASSES, clip=0.3)
    assert said in caplog.text
    assert " at test_masks.py:" in caplog.text


@pytest.mark.filterwarnings(
    "ignore:.torch.jit:DeprecationWarning", "ignore:.torch.jit:FutureWarning"
)
def test_a_scripted_module_is_told_with_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    model = seeded(lambda: Masked(lambda model, inputs: model.layer(inputs).mean(1)))
    model.add_module("layer", torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU())))
    with caplog.at_level(logging.WARNING, "discreet"):
        assert_matches(model, SERIES, CLASSES, clip=0.3)
    assert "layer is a scripted module" in caplog.text


class Numbered(nn.Module):
    """Positions counted by a mask of 0 and 1, as OPT has them: a mask of larger numbers would
    leave the table."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(9, 4), nn.Embedding(7, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        values = self.tokens(tokens) + self.places(mask.cumsum(1) * mask)
        return self.head(values.tanh().mean(1))  # type: ignore[no-any-return]


def test_positions_that_a_mask_counts_go_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("discreet.per_example.per_example.built_terms", None)
    mask = kept(SERIES).long()
    tokens = torch.randint(0, 9, (40, 6), generator=DRAWS)
    model = seeded(Numbered)
    gradients = single_gradients(model, (tokens, mask), CLASSES)
    wanted = (0.3 / gradients.norm(dim=1, keepdim=True)).clamp(max=1).mul(gradients).sum(0)
    total, _ = clipped_gradient_sum(model, (tokens, mask), targets=CLASSES, clip_norm=0.3)
    torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-5)


class Skips(nn.Module):
    """A mask that is left out if it hides nothing, as in GPT-2. Its tokens are large numbers.
    With `odd`, large tokens count twice if nothing is hidden."""

    def __init__(self, odd: bool = False) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(900, 4), nn.Linear(4, 3)
        self.odd = odd

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        PASSES.note(len(tokens))
        values = self.tokens(tokens).tanh()
        if mask.sum() == mask.numel():
            twice = 1 + (tokens > 1).unsqueeze(2) * int(self.odd)
            return self.head((values * twice).sum(1))  # type: ignore[no-any-return]
        return self.head((values * mask.unsqueeze(2)).sum(1))  # type: ignore[no-any-return]


PASSES = Notes()


@pytest.mark.parametrize(("odd", "passes"), [(False, 1), (True, 3)])
def test_a_branch_is_settled_for_every_batch_only_if_it_changes_nothing(
    odd: bool, passes: int
) -> None:
    tokens = torch.randint(0, 900, (40, 6), generator=DRAWS)
    mask = kept(SERIES).long()
    assert 0 < int(mask.all(1).sum()) < 40
    model = seeded(lambda: Skips(odd))
    gradients = single_gradients(model, (tokens, mask), CLASSES)
    wanted = (0.3 / gradients.norm(dim=1, keepdim=True)).clamp(max=1).mul(gradients).sum(0)
    for _ in range(2):
        PASSES.taken()
        total, _ = clipped_gradient_sum(model, (tokens, mask), targets=CLASSES, clip_norm=0.3)
        torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-5)
    assert len(PASSES.taken()) == passes


class Odd(nn.Module):
    """A layer of features (n, 4), or of complex ones (n, 2), beside whole numbers (n, any)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, rows: Tensor, beside: Tensor) -> Tensor:
        if rows.is_complex():
            rows = torch.view_as_real(rows).flatten(1)
        found: Tensor = self.layer(rows) + beside.sum(1, keepdim=True)
        return found


@pytest.mark.parametrize(("kind", "width"), [(torch.complex64, 2), (torch.float32, 0)])
def test_complex_inputs_and_empty_whole_numbers_go_side_by_side(
    kind: torch.dtype, width: int, caplog: pytest.LogCaptureFixture
) -> None:
    rows = torch.randn(6, 2 if kind.is_complex else 4, dtype=kind, generator=DRAWS)
    beside = torch.ones(6, width, dtype=torch.int64)
    with caplog.at_level(logging.INFO, "discreet"):
        clipped_gradient_sum(Odd(), (rows, beside), targets=CLASSES[:6], clip_norm=1.0)
    assert caplog.text == ""
