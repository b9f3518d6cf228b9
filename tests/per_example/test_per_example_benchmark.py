"""The benchmark of per-example clipping runs, small, and what it compares is the same work."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import per_example_speed as per_example
from benchmarks.loop_speed import error_of
from benchmarks.people_models import Case


@pytest.mark.slow
def test_every_model_and_batch_has_a_row() -> None:
    rows = per_example.rows(["lr"], [4, 6], seconds=0.0)
    assert [(row["model"], row["batch"]) for row in rows] == [("lr, 4", 4), ("lr, 6", 6)]
    assert all(row[name] > 0 for row in rows for name in ("plain ms", "sum", "step", "memory"))


def test_the_sum_is_that_of_single_examples() -> None:
    inputs, targets = torch.randn(5, 1, 28, 28), torch.tensor([0, 1, 2, 3, 4])
    assert error_of(Case(per_example.perceptron(), inputs, targets)) < 1e-4


def test_dropout_keeps_everything_where_the_sums_are_compared() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3))
    case = Case(model, torch.randn(5, 6), torch.tensor([0, 1, 2, 2, 1]))
    assert error_of(case) < 1e-4


def test_a_step_moves_the_parameters() -> None:
    case = Case(
        per_example.logistic_regression(), torch.randn(3, 1, 28, 28), torch.tensor([0, 1, 2])
    )
    before = [value.detach().clone() for value in case.model.parameters()]
    per_example.step_of(case).take()
    assert not any(
        torch.equal(old, new) for old, new in zip(before, case.model.parameters(), strict=True)
    )
