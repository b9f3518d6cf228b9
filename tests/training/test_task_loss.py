"""The loss follows what is predicted, and the settings within what fits it."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from discreet.client_settings import ConfigError, TaskConfig
from discreet.privacy.rules.objective import cross_entropy
from discreet.tasks.datasets import load_task
from discreet.training.fitting_loss import chance_loss, resolved_task
from discreet.training.task_loss import loss_of

DRAW = torch.Generator().manual_seed(70217)


@pytest.mark.parametrize(
    ("data", "loss"), [("digits", "cross_entropy"), ("multilabel", "binary_cross_entropy"), ("diabetes", "squared")]
)
def test_the_usual_loss_is_that_of_what_is_predicted(data: str, loss: str) -> None:
    assert resolved_task(TaskConfig(), load_task(data)).loss == loss


@pytest.mark.parametrize(
    ("data", "settings", "said"),
    [
        ("digits", TaskConfig("squared"), "task.loss must be cross_entropy for digits, whose targets are classes"),
        ("diabetes", TaskConfig("cross_entropy"), "task.loss must be squared or absolute or huber for diabetes"),
        ("multilabel", TaskConfig("huber"), "task.loss must be binary_cross_entropy for multilabel"),
        ("digits", TaskConfig(class_weights=[1.0, 2.0]), "one number a class: digits has 10 classes"),
        ("diabetes", TaskConfig(class_weights=[1.0]), "diabetes has numbers and no classes"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(data: str, settings: TaskConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        resolved_task(settings, load_task(data))
    assert "\n" not in str(error.value)


def test_plain_cross_entropy_is_the_function_that_the_fast_passes_know() -> None:
    assert loss_of(TaskConfig()) is cross_entropy
    assert loss_of(TaskConfig("cross_entropy")) is cross_entropy


def test_class_weights_multiply_and_nothing_divides_by_those_of_others() -> None:
    outputs, targets = torch.randn(6, 3, generator=DRAW), torch.tensor([0, 1, 2, 2, 1, 0])
    weights = [0.5, 2.0, 3.0]
    found = loss_of(TaskConfig(class_weights=weights))(outputs, targets)
    expected = functional.cross_entropy(outputs, targets, weight=torch.tensor(weights), reduction="none")
    torch.testing.assert_close(found, expected)


def test_huber_takes_its_delta_from_the_settings() -> None:
    found = loss_of(TaskConfig("huber", huber_delta=0.5))(torch.tensor([[0.25], [2.0]]), torch.zeros(2, 1))
    assert found.tolist() == [0.03125, 0.5 * (2.0 - 0.25)]


def test_the_loss_of_a_model_that_says_nothing_is_known() -> None:
    for data, expected in (("digits", math.log(10)), ("multilabel", math.log(2))):
        task = load_task(data)
        assert chance_loss(resolved_task(TaskConfig(), task), task) == pytest.approx(expected)
    diabetes = load_task("diabetes")
    middle = float(diabetes.test.targets.double().square().mean())
    assert chance_loss(TaskConfig("squared"), diabetes) == pytest.approx(middle)
