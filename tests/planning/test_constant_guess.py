"""Numbers that don't flatter: what a constant guess reaches, what is said of a model that is no
better, and scores of uneven classes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from discreet.data.examples import Examples, Task, TaskShape
from discreet.planning.constant_guess import ConstantGuess, constant_guess, last_warning
from discreet.queries.metrics import evaluate, is_uneven, uneven_scores
from discreet.run_files.compose import load_asked
from discreet.settings.training import TaskConfig
from discreet.simulation.in_process import simulate

PLAIN = (
    "training.learning_rate=1e-6",
    "privacy.user.enabled=false",
    "privacy.user.target_epsilon=null",
)
TARGETS = torch.tensor([0] * 18 + [1] * 2)


def task_of(targets: torch.Tensor) -> Task:
    examples = Examples(torch.zeros(len(targets), 2), targets)
    return Task("made", examples, examples, TaskShape((2,), 2))


def test_the_constant_guess_is_the_largest_share_and_the_entropy_of_the_shares() -> None:
    guess = constant_guess(task_of(TARGETS), TaskConfig("cross_entropy"))
    assert guess == ConstantGuess(
        pytest.approx(0.9), pytest.approx(-0.9 * math.log(0.9) - 0.1 * math.log(0.1)), True
    )


def test_another_loss_has_no_constant_to_compare_with() -> None:
    guess = constant_guess(task_of(TARGETS), TaskConfig("cross_entropy", [1.0, 9.0]))
    assert guess is not None
    assert guess.loss is None
    assert guess.warning({"accuracy": 0.95, "loss": 99.0}) is None


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"accuracy": 0.95, "loss": 0.2}, None),
        (
            {"accuracy": 0.9, "auc": 0.6, "loss": 0.3},
            "is not above the share of the largest class, 0.900: read auc 0.6",
        ),
        ({"accuracy": 0.95, "loss": 0.6}, "loss 0.600 is above the 0.325 of a constant guess"),
    ],
)
def test_a_model_that_is_no_better_is_told_in_one_line(
    row: dict[str, float], said: str | None
) -> None:
    found = last_warning(
        constant_guess(task_of(TARGETS), TaskConfig()), [{"loss": 0.1, "accuracy": 1.0}, row]
    )
    assert (found is None) == (said is None)
    assert said is None or said in str(found)
    assert "\n" not in str(found)


def test_a_test_set_of_one_class_rates_no_model_and_missing_scores_are_not_told() -> None:
    one = constant_guess(task_of(torch.ones(20, dtype=torch.int64)), TaskConfig())
    row = {"accuracy": 1.0, "loss": 0.2, "auc": math.nan, "balanced_accuracy": 1.0}
    said = str(last_warning(one, [row]))
    assert said == "the test set has one class alone, so no score of it says what the model learned"
    assert "-0.0" not in str(one)
    uneven = constant_guess(task_of(TARGETS), TaskConfig())
    assert "nan" not in str(last_warning(uneven, [{**row, "accuracy": 0.9}]))


def test_a_model_of_even_classes_or_of_numbers_that_has_learned_nothing_is_told() -> None:
    even = constant_guess(task_of(torch.tensor([0, 1] * 10)), TaskConfig())
    said = last_warning(even, [{"accuracy": 0.5, "loss": 0.6}])
    assert said is not None
    assert said.startswith("accuracy 0.500 is not above")
    assert "largest class, 0.500" in said
    third = ConstantGuess(6 / 11, None, uneven=False)
    assert third.warning({"accuracy": 0.5454545455}) is not None  # as metrics.csv has it
    assert "r2 -0.100 is not above 0" in str(last_warning(None, [{"r2": -0.1, "loss": 0.3}]))
    assert last_warning(None, [{"r2": 0.1, "loss": 0.3}]) is None


@pytest.mark.parametrize("classes", [2, 4])
def test_scores_of_uneven_classes_are_those_of_scikit_learn(classes: int) -> None:
    draws = np.random.default_rng(30817)
    targets = draws.choice(classes, 300, p=np.array([0.8, *[0.2 / (classes - 1)] * (classes - 1)]))
    logits = draws.normal(size=(300, classes)) + 2 * np.eye(classes)[targets]
    said = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    auc = roc_auc_score(targets, said[:, 1] if classes == 2 else said, multi_class="ovr")
    found = uneven_scores(torch.from_numpy(logits), torch.from_numpy(targets))
    assert found["balanced_accuracy"] == pytest.approx(
        balanced_accuracy_score(targets, logits.argmax(axis=1))
    )
    assert found["auc"] == pytest.approx(auc)


def test_classes_that_are_even_have_no_further_scores() -> None:
    assert is_uneven(TARGETS)
    assert not is_uneven(torch.tensor([0, 1] * 10))
    even = Examples(
        torch.randn(20, 2, generator=torch.Generator().manual_seed(30817)),
        torch.tensor([0, 1] * 10),
    )
    assert [*evaluate(torch.nn.Linear(2, 2), even).scores] == ["accuracy"]


def test_a_run_says_what_a_constant_guess_reaches_and_warns_once(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    words = [
        "data.name=breast_cancer",
        "data.num_clients=60",
        "rounds=1",
        "model.name=linear",
        "seed=30817",
    ]
    with caplog.at_level("INFO", "discreet"):
        simulate(*load_asked([*words, *PLAIN, f"output_dir={tmp_path / 'run'}"]))
    assert sum("accuracy of 0.6316" in line for line in caplog.messages) == 1
    assert (
        sum(
            "of a constant guess, so do not trust its probabilities" in line
            for line in caplog.messages
        )
        == 1
    )
