"""Loss, accuracy and the indicators of a binary classifier."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.metrics import r2_score, roc_auc_score
from torch import nn

from discreet.data.examples import Examples
from discreet.data.targets import LABELS, NUMBERS, Target
from discreet.queries.metrics import class_indicators, evaluate
from discreet.training.losses import LOSSES

NAN, INF = float("nan"), float("inf")


class Logits(nn.Module):
    """Gives its inputs as logits."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs


def logits(*rows: list[float], targets: list[int]) -> Examples:
    return Examples(torch.tensor(rows), torch.tensor(targets))


def test_loss_and_accuracy_are_those_computed_by_hand() -> None:
    table = logits([math.log(3.0), 0.0], [0.0, 0.0], [0.0, math.log(4.0)], targets=[0, 1, 0])
    expected = (-math.log(3 / 4) - math.log(1 / 2) - math.log(1 / 5)) / 3
    result = evaluate(Logits(), table)
    assert result.loss == pytest.approx(expected, rel=1e-6)
    assert result.scores["accuracy"] == pytest.approx(1 / 3)


def test_a_nan_among_the_logits_makes_the_loss_nan_and_the_example_wrong() -> None:
    # The NaN stands where the target is: argmax would take it for the largest value.
    result = evaluate(Logits(), logits([NAN, 0.0], [1.0, 0.0], targets=[0, 0]))
    assert math.isnan(result.loss)
    assert result.scores["accuracy"] == 0.5


def test_indicators_are_those_counted_by_hand() -> None:
    targets, scores = torch.tensor([1, 1, 1, 0, 0]), torch.tensor([0.9, 0.8, 0.3, 0.6, 0.1], dtype=torch.float64)
    found = class_indicators(torch.stack([1 - scores, scores], dim=1), targets)
    # Of the 3 * 2 pairs of a positive and a negative, one is in the wrong order: 0.3 below 0.6.
    assert found["auc"] == pytest.approx(5 / 6)
    # Above 0.8 lie two of three positives and no negative.
    assert found["ks"] == pytest.approx(2 / 3)
    assert found["accuracy"] == pytest.approx(3 / 5)
    assert found["precision"] == found["recall"] == found["f1"] == pytest.approx(2 / 3)
    expected = -sum(math.log(p) for p in (0.9, 0.8, 0.3, 0.4, 0.9)) / 5
    assert found["loss"] == pytest.approx(expected)


def test_numbers_have_r2_and_an_error_in_their_own_units() -> None:
    price = Target(NUMBERS, ("price",), (0.0,), (200.0,))
    table = Examples(torch.tensor([[-0.5], [0.0], [1.0]]), price.scaled(torch.tensor([[40.0], [110.0], [190.0]])))
    result = evaluate(Logits(), table, loss=LOSSES["squared"], target=price)
    said, truth = [50.0, 100.0, 200.0], [40.0, 110.0, 190.0]
    assert result.scores == pytest.approx({"r2": r2_score(truth, said), "mae": 10.0}, rel=1e-6)
    assert result.loss == pytest.approx(0.01, rel=1e-5)


def test_labels_are_right_one_by_one_and_auc_leaves_out_a_label_that_never_changes() -> None:
    topics = Target(LABELS, ("sport", "art", "always"))
    outputs = torch.tensor([[2.0, -1.0, 1.0], [-1.0, 3.0, 1.0], [1.0, 0.5, -1.0], [0.5, -2.0, 1.0]])
    table = Examples(outputs, torch.tensor([[1.0, 0, 1], [0, 1, 1], [0, 0, 1], [1, 0, 1]]))
    result = evaluate(Logits(), table, loss=LOSSES["binary_cross_entropy"], target=topics)
    aucs = [roc_auc_score(table.targets[:, column], outputs[:, column]) for column in (0, 1)]
    assert result.scores == pytest.approx({"accuracy": 9 / 12, "auc": sum(aucs) / 2})
    assert result.loss == pytest.approx(log_loss_of(outputs, table.targets), rel=1e-6)


def log_loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    chances = 1 / (1 + torch.exp(-outputs.double()))
    return float(-torch.where(targets == 1, chances.log(), (1 - chances).log()).mean())
