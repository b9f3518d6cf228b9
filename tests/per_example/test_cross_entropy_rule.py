"""Cross-entropy is computed for all examples at once, and gives each its own loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from discreet.layers.layer_rules import RULES
from discreet.per_example.objective import Loss
from discreet.per_example.per_example import clipped_gradient_sum
from tests.per_example.test_per_example_oracle import clipped_sum, single_gradients

CLASSES, LENGTH, COUNT = 4, 6, 7
NAME = "cross_entropy_loss"
WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 3.0])


def of_each(**settings: Any) -> Loss:
    """The loss of each example's positions by itself."""

    def losses(outputs: Tensor, targets: Tensor) -> Tensor:
        pairs = zip(outputs, targets, strict=True)
        return torch.stack([functional.cross_entropy(*pair, **settings) for pair in pairs])

    return losses


def by_position(**settings: Any) -> Loss:
    def losses(outputs: Tensor, targets: Tensor) -> Tensor:
        values = functional.cross_entropy(
            outputs.movedim(-1, 1), targets, reduction="none", **settings
        )
        return values.flatten(1).square().sum(1)

    return losses


def as_probabilities(outputs: Tensor, targets: Tensor) -> Tensor:
    return of_each()(outputs, functional.one_hot(targets, CLASSES).float())


AT_ONCE: dict[str, Loss] = {
    "mean": of_each(),
    "mean of those that count": of_each(ignore_index=0),
    "sum": of_each(reduction="sum", ignore_index=2),
    "weighted sum": of_each(reduction="sum", weight=WEIGHTS),
    "each position": by_position(ignore_index=1),
    "each position, weighted": by_position(weight=WEIGHTS),
}
BY_VMAP: dict[str, Loss] = {
    "weighted mean": of_each(weight=WEIGHTS),
    "label smoothing": of_each(label_smoothing=0.1),
    "probabilities": as_probabilities,
}


def case() -> tuple[nn.Module, Tensor, Tensor]:
    """A model, sequences, and their classes, of which every example has each at least once."""
    with torch.random.fork_rng():
        torch.manual_seed(60293)
        model = nn.Linear(3, CLASSES)
        inputs = torch.randn(COUNT, LENGTH, 3) * 2
        targets = torch.randint(CLASSES, (COUNT, LENGTH))
    targets[:, :CLASSES] = torch.arange(CLASSES)
    targets[0] = torch.tensor([0, 0, 0, 0, 0, 1])
    return model, inputs, targets


def check(loss: Loss, *, without: bool = False) -> None:
    """The sum and the norms are those of a loop. `without`: no position of an example counts."""
    model, inputs, targets = case()
    if without:
        targets[3] = 0
    total, norms = clipped_gradient_sum(model, inputs, targets=targets, clip_norm=0.7, loss=loss)
    gradients = single_gradients(model, inputs, targets, loss=loss)
    wanted, wanted_norms = clipped_sum(gradients, 0.7)
    torch.testing.assert_close(norms.double(), wanted_norms, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(total.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [*AT_ONCE, *BY_VMAP])
def test_each_example_has_its_own_cross_entropy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served = []

    def noting(*args: Any) -> Any:
        found = rule(*args)
        served.append(found is not NotImplemented)
        return found

    rule = RULES[NAME]
    monkeypatch.setitem(RULES, NAME, noting)
    check({**AT_ONCE, **BY_VMAP}[name])
    assert {*served} == {name in AT_ONCE}


def test_an_example_of_which_no_position_counts_has_the_gradient_that_it_has_alone() -> None:
    check(AT_ONCE["mean of those that count"], without=True)


def over_all(found: Tensor) -> Tensor:
    return found.mean(0, keepdim=True).expand_as(found)


def neighbours(found: Tensor) -> Tensor:
    return found.roll(1, 0)


def a_little_less(found: Tensor) -> Tensor:
    return found * 0.99


@pytest.mark.parametrize("wrong", [over_all, neighbours, a_little_less])
def test_a_rule_that_gives_an_example_another_loss_is_found(
    wrong: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    rule: Any = RULES[NAME]
    monkeypatch.setitem(RULES, NAME, lambda *args: wrong(rule(*args)))
    mean = AT_ONCE["mean of those that count"]

    def unlike(outputs: Tensor, targets: Tensor) -> Tensor:
        """A loss that is not the same if examples are exchanged."""
        return mean(outputs, targets).square() * (1 + targets.sum(1))

    with monkeypatch.context() as patch:
        patch.setitem(RULES, NAME, rule)
        check(unlike)
    with pytest.raises((AssertionError, ValueError)):
        check(unlike)
