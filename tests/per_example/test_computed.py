"""Weights that a forward computes from parameters alone are computed once, and their gradients are
those of the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from discreet.layers import computed
from discreet.layers.alone import Alone
from discreet.layers.computed import TakenBack
from discreet.layers.refusals import COPYING
from discreet.per_example import passes
from discreet.per_example.objective import cross_entropy, objective_of
from discreet.per_example.per_example import clipped_gradient_sum
from tests.per_example.test_per_example_choice import seeded
from tests.per_example.test_per_example_oracle import assert_matches
from tests.per_example.test_watch import TARGETS, Forward, built_is_an_error, rows

__all__ = ["built_is_an_error"]

pytestmark = pytest.mark.usefixtures("built_is_an_error")


class Standardised(nn.Module):
    """A convolution whose weight is standardised, as in NFNets."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3, padding=1)
        self.gain = nn.Parameter(torch.ones(6, 1, 1, 1))
        self.last = nn.Linear(6, 3)

    def weight(self) -> Tensor:
        flat = self.conv.weight.reshape(1, 6, -1)
        weight = functional.batch_norm(
            flat, None, None, weight=(self.gain * 0.3).view(-1), training=True, momentum=0.0
        )
        return weight.reshape_as(self.conv.weight)

    def forward(self, images: Tensor) -> Tensor:
        outputs = functional.conv2d(images, self.weight(), self.conv.bias, padding=1)
        return self.last(outputs.relu().mean((2, 3)))  # type: ignore[no-any-return]


class Twice(Standardised):
    """The computed weight is used twice, and its parameter once more."""

    def forward(self, images: Tensor) -> Tensor:
        weight = self.weight()
        first = functional.conv2d(images, weight, padding=1)
        second = functional.conv2d(images, weight, self.conv.bias, padding=1, dilation=1)
        third = functional.conv2d(images, self.conv.weight, padding=1)
        return self.last((first * second + third).mean((2, 3)))  # type: ignore[no-any-return]


class Language(nn.Module):
    """A table of words and outputs, which is read in a third way too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)

    def forward(self, ids: Tensor) -> Tensor:
        words = self.table(ids) * self.table.weight.square().mean(0)
        return functional.linear(words, self.table.weight).mean(1)


class Roots(nn.Module):
    """The root of 0 has an infinite slope."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.squares = nn.Parameter(torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.first(x), self.squares.sqrt())


def images() -> Tensor:
    return torch.randn(5, 2, 5, 5, generator=torch.Generator().manual_seed(7019))


def _turned(model: Any, x: Tensor) -> Tensor:
    return x @ model.first.weight.t() + model.first.bias.view(1, -1)


def _squares(model: Any, x: Tensor) -> Tensor:
    """A computed weight that meets values of an example outside of any layer."""
    return x * model.first.weight.square().sum(0) + x


def _several(model: Any, x: Tensor) -> Tensor:
    """The parts of a computed tuple, of which one is used in two ways."""
    upper, lower = (2 * model.first.weight).chunk(2)
    return (
        torch.cat([functional.linear(x, upper), functional.linear(x.tanh(), lower)], -1) * lower[0]
    )


def _largest(model: Any, x: Tensor) -> Tensor:
    """A named tuple of values and places."""
    return x * torch.max(model.first.weight, dim=0).values


def _in_place(model: Any, x: Tensor) -> Tensor:
    weight = model.first.weight * 2
    weight.mul_(0.5)
    return functional.linear(x, weight)


def _written(model: Any, x: Tensor) -> Tensor:
    weight = model.first.weight.clone()
    weight[0] = model.scale
    return functional.linear(x, weight)


def _not_followed(model: Any, x: Tensor) -> Tensor:
    return functional.linear(x, model.first.weight.detach() + model.first.weight.data)


FORWARDS = [_turned, _squares, _several, _largest, _in_place, _written, _not_followed]


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("floats", [1, 100, 2**22], ids=["one by one", "some", "all"])
@pytest.mark.parametrize("build", [Standardised, Twice])
def test_a_standardised_weight_has_the_gradients_of_plain_autograd(
    build: Callable[[], nn.Module], floats: int, order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(computed, "_FLOATS", floats)
    for clip in (1e-3, 0.05, 100.0):
        assert_matches(seeded(build), images(), TARGETS, clip=clip, order=order)


@pytest.mark.parametrize("floats", [1, 2**22])
@pytest.mark.parametrize("between", FORWARDS)
def test_functions_of_parameters_have_the_gradients_of_plain_autograd(
    between: Callable[[Any, Tensor], Tensor], floats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(computed, "_FLOATS", floats)
    assert_matches(seeded(lambda: Forward(between)), rows(), TARGETS, clip=0.2)


@pytest.mark.parametrize("floats", [1, 2**22])
def test_a_tied_table_that_is_computed_with_too_has_all_of_its_gradients(
    floats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(computed, "_FLOATS", floats)
    ids = torch.randint(7, (5, 6), generator=torch.Generator().manual_seed(6151))
    for clip in (0.01, 100.0):
        assert_matches(seeded(Language), ids, TARGETS, clip=clip)


@pytest.mark.parametrize("floats", [1, 2**22])
def test_gradients_that_are_not_finite_count_as_zero(
    floats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(computed, "_FLOATS", floats)
    total, norms = clipped_gradient_sum(Roots(), rows(), targets=TARGETS, clip_norm=1.0)
    assert not total.any()
    assert norms.isinf().all()


@pytest.mark.parametrize("kind", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_a_parametrisation_has_the_gradients_of_plain_autograd(kind: Any) -> None:
    model = seeded(lambda: nn.Sequential(kind(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 3)))
    assert_matches(model, rows(), TARGETS, clip=0.2)


def test_a_weight_is_computed_once_for_all_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, model = list[torch.Size](), seeded(Standardised)
    clipped_gradient_sum(model, images(), targets=TARGETS, clip_norm=1.0)  # and its trial
    real = torch.batch_norm

    def noted(values: Tensor, *given: Any) -> Tensor:
        seen.append(values.shape)
        return real(values, *given)

    monkeypatch.setattr(torch, "batch_norm", noted)
    clipped_gradient_sum(model, images(), targets=TARGETS, clip_norm=1.0)
    assert seen == [(1, 6, 18)]


def test_what_is_summed_is_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient of the weight that the standardisation takes away all but entirely: what is left
    of it would be rounding of another size if it were taken back after the sum."""
    monkeypatch.setattr(computed, "_FLOATS", 1)
    model = seeded(Standardised)
    with torch.no_grad():
        model.conv.weight.mul_(1e-4)  # type: ignore[union-attr, operator]
        model.conv.bias.add_(50)  # type: ignore[union-attr, operator]
    one = torch.full((1, 2, 5, 5), 1e4) + images()[:1]
    for clip in (1e-6, 1e-3, 1.0):
        total, (norm,) = clipped_gradient_sum(model, one, targets=TARGETS[:1], clip_norm=clip)
        assert float(total.double().norm()) <= min(clip, float(norm)) * (1 + 1e-5)


def test_a_weight_that_autograd_cannot_take_back_for_many_is_computed_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: Any) -> Any:
        raise RuntimeError("no batching rule")

    needs = set[str]()
    real = Alone.__init__

    def noting(self: Alone, *given: Any, questions: Any, **named: Any) -> None:
        needs.update(questions.needs)
        real(self, *given, questions=questions, **named)

    monkeypatch.setattr(computed.Computed, "taken_back", refused)
    monkeypatch.setattr(passes.Alone, "__init__", noting)
    assert_matches(seeded(Standardised), images(), TARGETS, clip=0.2)
    assert COPYING in needs


def test_the_terms_of_a_large_weight_are_built_when_they_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(computed, "_FLOATS", 1)
    objective = objective_of(seeded(Standardised), cross_entropy)
    from discreet.layers.branches import Questions
    from discreet.layers.draws import no_draws

    terms = passes.one_pass(objective, images(), TARGETS, Questions(), no_draws(5))
    assert sum(isinstance(term, TakenBack) for term in terms) == 1
