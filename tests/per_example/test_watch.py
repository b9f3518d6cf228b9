"""Models whose forward is their own code: watched if each example goes through alone, else refused
or by torch.func."""

from __future__ import annotations

import logging
import math
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from discreet.layers.alone import Alone
from discreet.layers.layer_rules import RULES
from discreet.per_example.per_example import clipped_gradient_sum
from tests.per_example.in_turn import sequential_sum
from tests.per_example.notes import Notes
from tests.per_example.test_per_example_choice import seeded
from tests.per_example.test_per_example_oracle import assert_matches


class Block(nn.Module):
    """A residual block as torchvision writes it, with GroupNorm."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(2, outer), nn.GroupNorm(2, outer)
        self.relu, self.conv2 = (
            nn.ReLU(inplace=True),
            nn.Conv2d(outer, outer, 3, padding=1, bias=False),
        )
        self.downsample = (
            None
            if stride == 1
            else nn.Sequential(nn.Conv2d(inner, outer, 1, stride), nn.GroupNorm(2, 4))
        )

    def forward(self, images: Tensor) -> Tensor:
        identity = images if self.downsample is None else self.downsample(images)
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(images)))))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers = nn.Conv2d(3, 4, 3), nn.Sequential(Block(4, 4, 1), Block(4, 4, 2))
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        features = self.pool(self.layers(functional.relu(self.stem(images))))
        return self.head(torch.flatten(features, 1))


class Encoder(nn.Module):
    """Self-attention by hand, fixed places added, a mean over time."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.queries, self.out = (
            nn.Embedding(7, 6),
            nn.Linear(6, 18),
            nn.Linear(6, 6),
        )
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)
        self.register_buffer("places", torch.linspace(0, 1, 60).view(1, 10, 6))

    def forward(self, tokens: Tensor) -> Tensor:
        inner = self.embedding(tokens) + self.places[:, : tokens.size(1)]  # type: ignore[index]
        count, steps, width = inner.shape
        query, key, value = (
            self.queries(inner).view(count, steps, 2, 9).permute(0, 2, 1, 3).chunk(3, dim=-1)
        )
        scores = (query @ key.transpose(-2, -1)) * width**-0.5
        mixed = torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), value)
        inner = self.norm(inner + self.out(mixed.transpose(1, 2).reshape(count, steps, -1)))
        return self.head(inner.mean(dim=1))


class Patches(nn.Module):
    """A vision transformer's parameters that no layer reads: a class token, places, a scale for
    each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.places = (
            nn.Parameter(torch.randn(1, 1, 6)),
            nn.Parameter(torch.randn(1, 20, 6)),
        )
        self.scale, self.shift = nn.Parameter(torch.randn(6)), nn.Parameter(torch.tensor(0.3))
        self.patches, self.head = nn.Conv2d(3, 6, 2, 2), nn.Linear(6, 3)

    def forward(self, images: Tensor) -> Tensor:
        inner = self.patches(images).flatten(2).transpose(1, 2)
        inner = torch.cat([self.token.expand(images.shape[0], -1, -1), inner], dim=1)
        inner = inner + self.places[:, : inner.shape[1]]
        inner = inner + self.scale * torch.tanh(inner) - self.shift
        return self.head(inner[:, 0] + inner.mean(1) * self.scale)


def images(count: int = 5) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(6229))


def tokens(count: int = 5) -> Tensor:
    return torch.randint(0, 7, (count, 4), generator=torch.Generator().manual_seed(1301))


TARGETS = torch.tensor([0, 1, 2, 2, 1])


@pytest.fixture
def fallen_back(caplog: pytest.LogCaptureFixture) -> Callable[[], bool]:
    """True if torch.func or a loop was used, as the log says."""
    caplog.set_level(logging.INFO, logger="discreet")
    return lambda: any("are computed by" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize(
    ("build", "inputs"), [(ResNet, images), (Encoder, tokens), (Patches, images)]
)
def test_a_forward_of_layers_and_operations_is_served_by_rules(
    build: Callable[[], nn.Module],
    inputs: Callable[[], Tensor],
    order: int,
    fallen_back: Callable[[], bool],
) -> None:
    model = seeded(build)
    for count in (5, 2, 1):
        assert_matches(model, inputs()[:count], TARGETS[:count], clip=0.4, order=order)
    assert not fallen_back()


class Forward(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: Callable[[Forward, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)
        self.scale, self.between, self.seen = nn.Parameter(torch.ones(4)), between, 0
        self.wide, self.alias = nn.Parameter(torch.ones(3, 4)), self.first.weight
        self.register_buffer("table", torch.arange(12.0).view(3, 4) / 12)
        self.register_buffer("last", torch.zeros(4))

    def forward(self, rows: Tensor) -> Tensor:
        return self.second(self.between(self, self.first(rows)))


def rows(count: int = 5) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(90))


MIXING: dict[str, Callable[[Forward, Tensor], Tensor]] = {
    "a mean over examples": lambda model, x: x - x.mean(0),
    "a softmax over examples": lambda model, x: x.softmax(0),
    "another example": lambda model, x: x + x.flip(0),
    "another example beside": lambda model, x: x + x.flip(1, 0),
    "a diagonal": lambda model, x: (
        x + torch.einsum("bb->b", torch.cat([x, x], 1)[:, : len(x)]).unsqueeze(1)
    ),
    "the whole by no dimension": lambda model, x: x - x.mean(dim=(), keepdim=True),
    "a numpy index": lambda model, x: x + x[np.arange(len(x))[::-1].copy()],
    "places as numbers": lambda model, x: x + torch.arange(x.size(0)).unsqueeze(1),
    "the first example": lambda model, x: x + x[:1],
    "a cumulative sum": lambda model, x: x.cumsum(0),
    "a product over examples": lambda model, x: (x @ x.t()).softmax(1) @ x,
    "an einsum over examples": lambda model, x: torch.einsum("bi,ci->bi", x, x),
    "examples turned into features": lambda model, x: x.reshape(-1, 3).softmax(1).reshape(-1, 4),
    "a broadcast that pairs examples": lambda model, x: (
        x.unsqueeze(1) - x.unsqueeze(1).transpose(0, 1)
    ).sum(1),
    "a number for each example, along features": lambda model, x: x * x.sum(1),
    "its length as a number": lambda model, x: x / len(x),
    "numbers that are read": lambda model, x: x + torch.tensor(x.detach().tolist()).mean(),
    "a padded batch": lambda model, x: functional.pad(x, (0, 0, 1, -1)),
    "a gradient of everything": lambda model, x: (
        x * torch.autograd.grad(x.sum(), x, create_graph=True)[0]
    ),
    "the number of examples": lambda model, x: x / x.size(0),
    "the number of examples in arithmetic": lambda model, x: x * (x.size(0) + 1),
    "as many copies as examples": lambda model, x: x.unsqueeze(1).expand(-1, x.size(0), -1).sum(1),
    "a branch on the number of examples": lambda model, x: x.relu() if x.size(0) > 2 else x,
    "another order of the examples": lambda model, x: x[x.sum(1).argsort()],
    "a table by the place in the batch": lambda model, x: x + model.table[: len(x)],  # type: ignore[index]
    "a parameter of as many rows as examples": lambda model, x: x + model.wide,
    "a table of as many rows as examples": lambda model, x: x + model.table,  # type: ignore[operator]
}


class ByTorchFunc(Exception):
    """Raised in place of what builds every gradient."""


@pytest.fixture
def built_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*batch: object, reason: str) -> None:
        raise ByTorchFunc(reason)

    monkeypatch.setattr("discreet.per_example.per_example.built_terms", raises)


@pytest.mark.usefixtures("built_is_an_error")
@pytest.mark.parametrize(
    "count", [2, 3, 4]
)  # four features, and a table of three rows: sizes that agree by chance
@pytest.mark.parametrize("name", MIXING)
def test_what_may_mix_examples_is_refused_by_its_line_or_takes_each_alone(
    name: str, count: int
) -> None:
    model = seeded(lambda: Forward(MIXING[name]))
    for _ in range(2):
        try:
            assert_matches(model, rows()[:count], TARGETS[:count], clip=0.2)
        except ByTorchFunc:
            continue
        except ValueError as error:
            assert re.search(r"mixes examples: .* at test_watch.py", str(error))  # noqa: PT017


@pytest.mark.parametrize(
    "name",
    [
        "a mean over examples",
        "a softmax over examples",
        "another example",
        "its length as a number",
    ],
)
def test_a_forward_whose_author_meant_a_batch_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"mixes examples: .* at test_watch.py"):
        clipped_gradient_sum(
            seeded(lambda: Forward(MIXING[name])), rows(), targets=TARGETS, clip_norm=0.2
        )


def test_a_wrong_rule_is_noticed_on_made_up_examples(
    monkeypatch: pytest.MonkeyPatch, fallen_back: Callable[[], bool]
) -> None:
    right = RULES["linear"]

    def shifted(alone: Alone, inputs: Tensor, *parameters: Tensor) -> Tensor:
        outputs: Tensor = right(alone, inputs, *parameters)
        edge, terms = alone.uses[-1]
        alone.uses[-1] = edge, lambda grads: terms(grads.roll(1, 0))
        return outputs

    monkeypatch.setitem(RULES, "linear", shifted)
    assert_matches(seeded(lambda: Forward(lambda model, x: x.relu())), rows(), TARGETS, clip=0.2)
    assert fallen_back()


def test_a_batch_that_is_squeezed_keeps_its_examples() -> None:
    plain = seeded(lambda: Forward(lambda model, x: x.relu()))
    squeezed = seeded(lambda: Forward(lambda model, x: x.relu().view(len(x), 1, 4, 1).squeeze()))
    sums = [
        clipped_gradient_sum(model, rows(), targets=TARGETS, clip_norm=0.2)[0]
        for model in (plain, squeezed)
    ]
    torch.testing.assert_close(*sums)


def _frozen_for_a_while(model: Forward, x: Tensor) -> Tensor:
    with torch.no_grad():
        held = x * 2
    return x + held


def _overwrites(model: Forward, x: Tensor) -> Tensor:
    held = x.detach().clone()
    product: Tensor = model.second(held)
    held.mul_(2)
    return x + product.sum(1, keepdim=True)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: object, grads: Tensor) -> Tensor:
        return 3 * grads


def _hooked(model: Forward, x: Tensor) -> Tensor:
    x.register_hook(lambda grads: grads - grads.mean(0))
    return x


ELSEWHERE = torch.ones(4)
UNKNOWN: dict[str, Callable[[Forward, Tensor], Tensor]] = {
    "a layer whose inputs are overwritten": _overwrites,
    "a shape for one number of examples": lambda model, x: x.view(5, 4),
    "a hook on a tensor": _hooked,
    "numbers that numpy reads": lambda model, x: (
        x + torch.tensor(x.detach().numpy().mean(1)).unsqueeze(1)
    ),
}


def _written(x: Tensor) -> Tensor:
    found = x.new_zeros(x.size(0), 4)
    found[:, 1:] = x[:, :3]
    return found


def _filled(x: Tensor) -> Tensor:
    found = torch.zeros(x.shape[0], 4)
    found[:, 1:] += x[:, :3]
    return found


def _asserting(x: Tensor) -> Tensor:
    count, width = x.shape
    assert count > 0
    assert width == 4
    assert x.shape == x.tanh().shape
    return x.view(count * 2, width // 2).view(count, -1)


def _steps_first(model: Forward, x: Tensor) -> Tensor:
    steps: Tensor = model.first(x.view(-1, 2, 2).transpose(0, 1).repeat(1, 1, 2))
    return steps.sum(0)


def _in_one_dimension(model: Forward, x: Tensor) -> Tensor:
    flat: Tensor = model.first(x.repeat(1, 3).view(-1, 4))
    return flat.view(-1, 12)[:, 3:7]


def _two_towers(model: Forward, x: Tensor) -> Tensor:
    left, right = model.first(torch.cat([x, x.tanh()])).chunk(2)
    return functional.cosine_similarity(left, right, dim=1).unsqueeze(1) * right


SERVED: dict[str, Callable[[Forward, Tensor], Tensor]] = {
    "a function with its own derivative": lambda model, x: Doubled.apply(x),  # type: ignore[no-untyped-call]
    "any operation of PyTorch": lambda model, x: torch.special.entr(x.sigmoid()),
    "a tensor from elsewhere": lambda model, x: x + ELSEWHERE,
    "one example after the other": lambda model, x: torch.stack([row * row.norm() for row in x]),
    "numbers of its own that are drawn": lambda model, x: x + 0 * torch.randint(0, 3, (len(x), 4)),
    "differences": lambda model, x: torch.diff(x, prepend=x[:, :1]),
    "a parameter among other tensors": lambda model, x: torch.cat(
        [x.unsqueeze(1), model.scale.expand(len(x), 1, 4)], 1
    ).sum(1),
    "rows of a parameter": lambda model, x: x + model.wide[x[:, 0].relu().long().clamp(max=2)],
    "a parameter that is turned": lambda model, x: x @ model.first.weight.T,
    "frequencies": lambda model, x: torch.fft.rfft(x).abs().sum(1, keepdim=True) * x,
    "zeros that are filled": lambda model, x: _filled(x),
    "a distribution": lambda model, x: x + 0 * torch.distributions.Normal(x, 1.0).rsample(),
    "a weight that a layer reads too": lambda model, x: (x.unsqueeze(1) * model.alias).sum(1),
    "a weight that a function reads": lambda model, x: functional.linear(x, model.first.weight),
    "gradients switched off": _frozen_for_a_while,
    "sorted": lambda model, x: x.sort(1).values,
    "its own answer": lambda model, x: x.relu() if bool((x > -9).all()) else x,
    "its length": lambda model, x: x.view(len(x), 2, 2).flatten(1),
    "padded beside the examples": lambda model, x: functional.pad(x, (1, 0, 0, 0))[:, :4],
    "the shapes of other tensors": lambda model, x: (
        x.view(-1, 2, 2).reshape_as(x.tanh()) * x[:, :1].expand_as(x) + model.scale.expand_as(x)
    ),
    "a loop over positions": lambda model, x: torch.stack(
        [x[:, place] * place for place in range(4)], dim=1
    ),
    "steps first": _steps_first,
    "examples and positions in one dimension": _in_one_dimension,
    "a scale for examples and positions in one dimension": lambda model, x: (
        x.repeat(1, 3).view(-1, 4) * model.scale.exp()
    ).view(-1, 12)[:, 3:7],
    "a scale for two batches in one": lambda model, x: sum(
        (torch.cat([x, x.tanh()]) * model.scale).chunk(2)
    ),
    "two towers in one batch": _two_towers,
    "a place of its own": lambda model, x: x + x[torch.arange(x.size(0)), x.argmax(1)].unsqueeze(1),
    "zeros that are written": lambda model, x: _written(x),
    "an einsum with a weight": lambda model, x: torch.einsum("bi,ij->bj", x, model.first.weight),
    "a matrix product with a weight": lambda model, x: (
        x @ model.first.weight + model.scale @ model.first.weight
    ),
    "a weight made of weights": lambda model, x: functional.linear(
        x, model.first.weight / model.first.weight.norm()
    ),
    "assertions and shapes": lambda model, x: _asserting(x),
    "a first state of its length": lambda model, x: x + model.first(torch.zeros(len(x), 4)).tanh(),
    "as many rows as examples by chance": lambda model, x: (
        x.view(len(x), 4)
        + (x.unsqueeze(1) * torch.linspace(0, 1, 20).view(5, 4) * x.new_ones(5, 4)).sum(1)
    ),
}


@pytest.mark.usefixtures("built_is_an_error")
@pytest.mark.parametrize("name", SERVED)
def test_what_treats_each_example_alone_is_watched(name: str) -> None:
    model = seeded(lambda: Forward(SERVED[name]))
    for order in (2, 1):
        assert_matches(model, rows(), TARGETS, clip=0.2, order=order)


def _by_experts(model: Forward, x: Tensor) -> Tensor:
    """As a mixture of experts takes examples: those of one expert after another, and then back in
    their order."""
    order = x[:, 0].argsort()
    left, right = x[order].split([int((x[:, 0] <= 0).sum()), int((x[:, 0] > 0).sum())])
    return torch.cat([left.tanh(), model.first(right)])[order.argsort()]


def test_an_order_that_is_undone_again_is_no_order_of_one_example(
    fallen_back: Callable[[], bool],
) -> None:
    model = seeded(lambda: Forward(_by_experts))
    assert_matches(model, rows(), TARGETS, clip=0.2)
    assert not fallen_back()


class WithLoss(nn.Module):
    """A model that gives a mean over the batch beside its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, rows: Tensor) -> dict[str, Tensor]:
        logits = self.layer(rows)
        return {"logits": logits, "loss": logits.square().mean()}


def of_logits(loss: Callable[..., Tensor]) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    return lambda outputs, targets: (
        loss(outputs["logits"], targets).reshape(targets.size(0), -1).mean(1)
    )


OTHER = nn.functional.one_hot(TARGETS, 3).float()
EACH: dict[str, tuple[Callable[..., Tensor], Tensor]] = {
    "cross_entropy": (functional.cross_entropy, TARGETS),
    "mse_loss": (functional.mse_loss, OTHER),
    "binary_cross_entropy_with_logits": (functional.binary_cross_entropy_with_logits, OTHER),
    "multi_margin_loss": (functional.multi_margin_loss, TARGETS),
    "triplet_margin_loss": (
        lambda x, y, **how: functional.triplet_margin_loss(x, y, 1 - y, **how),
        OTHER,
    ),
}


@pytest.mark.usefixtures("built_is_an_error")
@pytest.mark.parametrize("name", EACH)
def test_a_loss_of_one_of_several_outputs_is_watched_and_may_not_reduce(name: str) -> None:
    loss, targets = EACH[name]
    model, each = seeded(WithLoss), of_logits(lambda *given: loss(*given, reduction="none"))
    total, norms = clipped_gradient_sum(model, rows(), targets=targets, clip_norm=0.2, loss=each)
    apart = [clipped_gradient_sum(model, x[None], targets=y[None], clip_norm=0.2, loss=each)
             for x, y in zip(rows(), targets, strict=True)]  # fmt: skip
    torch.testing.assert_close(total, sum(one for one, _ in apart))
    torch.testing.assert_close(norms, torch.cat([norm for _, norm in apart]))
    reduced = of_logits(lambda x, y: loss(x, y).expand(y.size(0)))
    with pytest.raises(ValueError, match="depends on other examples of the batch"):
        clipped_gradient_sum(seeded(WithLoss), rows(), targets=targets, clip_norm=0.2, loss=reduced)


class Speech(nn.Module):
    """Log probabilities as the CTC loss takes them, (T, n, classes)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.GRU(2, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.layer(rows.view(-1, 6, 2))[0]).log_softmax(2).transpose(0, 1)  # type: ignore[no-any-return]


@pytest.mark.usefixtures("built_is_an_error")
def test_a_loss_may_take_outputs_with_the_examples_second() -> None:
    def loss(outputs: Tensor, targets: dict[str, Tensor], reduction: str = "none") -> Tensor:
        return functional.ctc_loss(
            outputs, targets["labels"], *map(targets.get, ("steps", "count")), reduction=reduction
        )  # type: ignore[arg-type]

    model, inputs = seeded(Speech), torch.randn(5, 12, generator=torch.Generator().manual_seed(907))
    targets = {
        "labels": torch.tensor([[1, 2], [2, 1], [3, 3], [1, 0], [2, 3]]),
        "steps": torch.tensor([6, 5, 6, 4, 6]),
    }
    targets["count"] = torch.tensor([2, 2, 2, 1, 2])
    total, norms = clipped_gradient_sum(model, inputs, targets=targets, clip_norm=0.2, loss=loss)
    each = [
        {name: value[place : place + 1] for name, value in targets.items()} for place in range(5)
    ]
    alone = [
        clipped_gradient_sum(model, x[None], targets=y, clip_norm=0.2, loss=loss)
        for x, y in zip(inputs, each, strict=True)
    ]
    torch.testing.assert_close(total, sum(one for one, _ in alone))
    torch.testing.assert_close(norms, torch.cat([norm for _, norm in alone]))
    reduced = lambda outputs, targets: loss(outputs, targets, "mean").expand(5)  # noqa: E731
    with pytest.raises(ValueError, match="one value an example"):
        clipped_gradient_sum(seeded(Speech), inputs, targets=targets, clip_norm=0.2, loss=reduced)


@pytest.mark.parametrize(("wrong", "is_watched"), [(2, True), (3, False)])
def test_one_made_up_batch_at_a_kink_does_not_decide_the_way(
    wrong: int, is_watched: bool, monkeypatch: pytest.MonkeyPatch, fallen_back: Callable[[], bool]
) -> None:
    answers = iter(["a kink"] * 2 * wrong + [""])  # in float32, and in float64
    monkeypatch.setattr("discreet.per_example.agreement._tried_on", lambda *given: next(answers))
    assert_matches(seeded(lambda: Forward(lambda model, x: x.relu())), rows(), TARGETS, clip=0.2)
    assert fallen_back() is not is_watched


def _drawn_branch(model: Forward, x: Tensor) -> Tensor:
    kept = functional.dropout(x, 0.5)
    return kept.relu() if bool(kept.detach().flatten()[0] != 0) else x


def _drawn_mask(model: Forward, x: Tensor) -> Tensor:
    mask = functional.dropout(x, 0.5) != 0
    found = torch.zeros_like(x)
    found[mask] = x[mask]
    return found


def _drawn_lengths(model: Forward, x: Tensor) -> Tensor:
    kept = functional.dropout(torch.ones_like(x), 0.5)
    lengths = 1 + (kept[:, 1:] != 0).sum(1)
    packed = pack_padded_sequence(x.unsqueeze(2), lengths, batch_first=True, enforce_sorted=False)
    found: Tensor = pad_packed_sequence(packed, batch_first=True, total_length=x.shape[1])[0]
    return found.squeeze(2)


@pytest.mark.usefixtures("built_is_an_error")
@pytest.mark.parametrize("between", [_drawn_branch, _drawn_mask, _drawn_lengths])
def test_a_branch_on_what_was_drawn_is_not_watched(between: Any) -> None:
    with pytest.raises(ByTorchFunc, match="read what was drawn"):
        clipped_gradient_sum(
            seeded(lambda: Forward(between)), 100 * rows(), targets=TARGETS, clip_norm=0.2
        )


@pytest.mark.usefixtures("built_is_an_error")
def test_examples_that_answer_differently_are_run_apart() -> None:
    def between(model: Forward, x: Tensor) -> Tensor:
        return x.relu() if bool((x.detach() > 0.4).any()) else model.first(x)

    assert_matches(seeded(lambda: Forward(between)), 2 * rows(), TARGETS, clip=0.2)


ANSWERS = Notes()


class Masked(nn.Module):
    """Adds up places that a mask leaves; `factor`, of a mask that hides nothing, is 1 if it only
    saves a product.

    No made-up number is above 2: a question about that is never answered for all."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(2, 3), factor

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        values = self.layer(x)
        whole = ANSWERS.note(bool(mask.all()))
        summed = (self.factor * values if whole else values * mask.unsqueeze(-1)).sum(1)
        return 2 * summed if (mask > 0).any() and (x.detach() > 2).any() else summed


@pytest.mark.usefixtures("built_is_an_error")
@pytest.mark.parametrize(("factor", "answers"), [(1.0, [False]), (2.0, [False, True])])
def test_a_question_whose_answer_changes_no_gradient_has_one_answer_for_every_batch(
    factor: float, answers: list[bool]
) -> None:
    model, mask = seeded(lambda: Masked(factor)), torch.ones(5, 2, dtype=torch.int64)
    mask[2:, 1] = 0
    values = rows().view(5, 2, 2).clamp(max=2)
    clipped_gradient_sum(model, (values, mask), targets=TARGETS, clip_norm=0.2)
    for given, seen in ((mask, answers), (torch.ones_like(mask), answers[-1:])):
        ANSWERS.taken()
        clipped_gradient_sum(model, (values, given), targets=TARGETS, clip_norm=0.2)
        assert seen == ANSWERS.taken()
    values[::2] += 3
    found, _ = clipped_gradient_sum(model, (values, mask), targets=TARGETS, clip_norm=0.2)
    torch.testing.assert_close(
        found, sequential_sum(model, (values, mask), targets=TARGETS, clip_norm=0.2)
    )


@pytest.mark.usefixtures("built_is_an_error")
def test_an_example_that_answers_nan_is_run_apart_and_counts_as_zero() -> None:
    def between(model: Forward, x: Tensor) -> Tensor:
        return x.relu() if x.detach().sum().item() > 0.5 else x

    inputs, kept = rows(), [0, 1, 3, 4]
    inputs[2] = math.nan
    total, norms = clipped_gradient_sum(
        seeded(lambda: Forward(between)), inputs, targets=TARGETS, clip_norm=0.2
    )
    wanted, _ = clipped_gradient_sum(
        seeded(lambda: Forward(between)), inputs[kept], targets=TARGETS[kept], clip_norm=0.2
    )
    assert norms[2] == math.inf
    torch.testing.assert_close(total, wanted)


@pytest.mark.usefixtures("built_is_an_error")
@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_is_not_watched(name: str) -> None:
    model = seeded(lambda: Forward(UNKNOWN[name]))
    with pytest.raises(ByTorchFunc):
        clipped_gradient_sum(model, rows(), targets=TARGETS, clip_norm=0.2)


@pytest.mark.parametrize("place", ["", "first", "layers.0"])
def test_what_a_hook_does_is_watched_too(place: str) -> None:
    model = (
        seeded(ResNet)
        if place.startswith("layers")
        else seeded(lambda: Forward(lambda model, x: x.relu()))
    )
    inputs = images() if place.startswith("layers") else rows()
    handle = model.get_submodule(place).register_forward_hook(
        lambda module, given, outputs: outputs - outputs.mean(0)
    )
    with pytest.raises(ValueError, match="mixes examples: mean"):
        clipped_gradient_sum(model, inputs, targets=TARGETS, clip_norm=0.2)
    handle.remove()
    model.get_submodule(place).register_forward_hook(lambda module, given, outputs: 2 * outputs)
    assert_matches(model, inputs, TARGETS, clip=0.2)


def _linear() -> nn.Module:
    return seeded(lambda: nn.Linear(4, 3))


CHANGES: dict[str, Callable[[Forward], object]] = {
    "mode": lambda model: model.eval(),
    "attribute": lambda model: setattr(model, "seen", 4),
    "function": lambda model: setattr(model, "between", lambda model, x: x.tanh()),
    "layer": lambda model: setattr(
        model, "second", nn.Sequential(_linear(), nn.Tanh(), seeded(lambda: nn.Linear(3, 3)))
    ),
    "weight": lambda model: setattr(model.first, "weight", model.alias),
    "frozen": lambda model: model.first.requires_grad_(False),
    "hook": lambda model: model.first.register_forward_hook(
        lambda module, given, outputs: 5 * outputs
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changes_is_served_as_it_is(change: str) -> None:
    model = seeded(lambda: Forward(lambda model, x: x * (2 if model.training else 3) + model.seen))
    model.alias = nn.Parameter(model.alias.detach().clone())
    assert_matches(model, rows(), TARGETS, clip=0.2)
    CHANGES[change](model)
    assert_matches(model, rows(), TARGETS, clip=0.2)


def test_frozen_parameters_may_be_used_as_numbers_and_twice() -> None:
    model = seeded(lambda: Forward(lambda model, x: model.first(x.relu()) * model.scale))
    model.first.requires_grad_(False)
    model.scale.requires_grad_(False)
    assert_matches(model, rows(), TARGETS, clip=0.2)


def _random_operations(draws: random.Random) -> Callable[[Forward, Tensor], Tensor]:
    """A few operations with dimensions drawn at random, many of which mix examples or fit no tensor
    at all."""
    dims = [draws.choice([-3, -2, -1, 0, 1, 2, 3]) for _ in range(12)]
    names = [draws.choice(sorted(RANDOM_OPERATIONS)) for _ in range(draws.randint(1, 4))]

    def between(model: Forward, x: Tensor) -> Tensor:
        inner = [x]
        for place, name in enumerate(names):
            inner.append(
                RANDOM_OPERATIONS[name](
                    inner[-1], inner[dims[place] % len(inner)], *dims[2 * place :][:2]
                )
            )
        return x + inner[-1].reshape(inner[-1].shape[0], -1).tanh().mean(1, keepdim=True)

    return between


RANDOM_OPERATIONS: dict[str, Callable[[Tensor, Tensor, int, int], Tensor]] = {
    "softmax": lambda x, y, d, e: x.softmax(d),
    "mean": lambda x, y, d, e: x.mean(d),
    "centred": lambda x, y, d, e: x - x.mean(d, keepdim=True),
    "sum": lambda x, y, d, e: x.sum((d, e), keepdim=True),
    "cumulative": lambda x, y, d, e: x.cumsum(d),
    "flipped": lambda x, y, d, e: x.flip(d) * x,
    "rolled": lambda x, y, d, e: x.roll(1, d) * x,
    "turned": lambda x, y, d, e: x.transpose(d, e),
    "wider": lambda x, y, d, e: x.unsqueeze(d),
    "narrower": lambda x, y, d, e: x.squeeze(d),
    "squeezed": lambda x, y, d, e: x.squeeze(),
    "joined": lambda x, y, d, e: torch.cat([x, y], d),
    "stacked": lambda x, y, d, e: torch.stack([x, y], d),
    "picked": lambda x, y, d, e: x.select(d, e),
    "item": lambda x, y, d, e: x[:, d],
    "row": lambda x, y, d, e: x[d],
    "last": lambda x, y, d, e: x[..., d],
    "part": lambda x, y, d, e: x.chunk(2, d)[e % 2],
    "flat": lambda x, y, d, e: x.flatten(d),
    "shaped": lambda x, y, d, e: x.reshape(x.size(d), -1),
    "squared": lambda x, y, d, e: x.reshape(-1, 4),
    "fours": lambda x, y, d, e: x.reshape(-1, 2, 2).softmax(d),
    "added": lambda x, y, d, e: x + y,
    "multiplied": lambda x, y, d, e: x * y.sigmoid(),
    "product": lambda x, y, d, e: x @ y.transpose(d, e),
    "scaled": lambda x, y, d, e: x / x.size(d),
    "spread": lambda x, y, d, e: x.unsqueeze(d).expand(-1, x.size(e), -1),
    "padded": lambda x, y, d, e: functional.pad(x, (0, 0, d, -d)),
    "largest": lambda x, y, d, e: x.max(d).values,
    "normal": lambda x, y, d, e: functional.normalize(x, dim=d),
    "pooled": lambda x, y, d, e: functional.avg_pool1d(x, 2),
}


@pytest.mark.usefixtures("built_is_an_error")
def test_whatever_is_watched_is_right_for_each_example() -> None:
    draws, served, refused = random.Random(40927), 0, 0
    for _ in range(90):
        model = seeded(lambda: Forward(_random_operations(draws)))
        count = draws.choice([2, 4, 4, 5])
        try:
            assert_matches(model, rows()[:count], TARGETS[:count], clip=0.2)
            served += 1
        except (ByTorchFunc, ValueError, IndexError, RuntimeError):
            refused += 1
    assert served > 6
    assert refused > 20


class Softened(nn.Module):
    """A softmax along the outputs of a layer, or along the examples."""

    def __init__(self, *, of_examples: bool) -> None:
        super().__init__()
        self.of_examples, self.inner, self.head = of_examples, nn.Linear(3, 7), nn.Linear(7, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        found = self.inner(inputs)
        soft = functional.softmax(found.t() if self.of_examples else found, dim=1)
        logits: Tensor = self.head(soft.t() if self.of_examples else soft)
        return logits


def test_a_call_of_the_same_shapes_is_checked_again_if_the_examples_lie_otherwise() -> None:
    inputs, targets = torch.randn(7, 3), torch.arange(7) % 2  # as many as are made up
    for _ in range(2):  # what is found of a call is kept, and serves the next pass
        clipped_gradient_sum(Softened(of_examples=False), inputs, targets=targets, clip_norm=1.0)
    with pytest.raises(ValueError, match="mixes examples: softmax"):
        clipped_gradient_sum(Softened(of_examples=True), inputs, targets=targets, clip_norm=1.0)


@pytest.mark.usefixtures("built_is_an_error")
@pytest.mark.parametrize("way", [False, True])
def test_gradient_checkpointing_is_undone(way: bool) -> None:
    plain = seeded(lambda: Forward(lambda model, x: model.first(x).tanh()))
    saving = seeded(
        lambda: Forward(
            lambda model, x: checkpoint(lambda y: model.first(y).tanh(), x, use_reentrant=way)
        )
    )
    sums = [
        clipped_gradient_sum(model, rows(), targets=TARGETS, clip_norm=0.2)[0]
        for model in (plain, saving)
    ]
    torch.testing.assert_close(*sums)


@pytest.mark.usefixtures("built_is_an_error")
def test_a_vmap_in_the_forward_is_one_inside() -> None:
    model = seeded(
        lambda: Forward(
            lambda model, x: torch.func.vmap(lambda row: model.first(row) * model.scale)(x)
        )
    )
    assert_matches(model, rows(), TARGETS, clip=0.2)
