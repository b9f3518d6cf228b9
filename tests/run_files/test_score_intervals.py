"""Intervals of scores: their values are the scores, and they hold the truth as often as they say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from discreet.data.targets import CLASS, LABELS, NUMBERS, SEQUENCES, Target
from discreet.queries.metrics import number_scores, uneven_scores
from discreet.run_files.compose import load_asked
from discreet.run_files.predictions import indicators_of, load_model, task_of
from discreet.run_files.predictions import predict as predicted
from discreet.run_files.score_intervals import _auc, intervals_of
from discreet.simulation.in_process import simulate
from tests.command import export, predict, report
from tests.tables.made_tables import make_project


def test_a_weighted_auc_is_that_of_repeated_rows() -> None:
    draws = np.random.default_rng(40127)
    scores, positive = draws.integers(9, size=60) / 9.0, draws.random(60) < 0.3
    weights = draws.integers(4, size=(7, 60)).astype(float)
    found = _auc(scores, positive)(weights)
    for value, row in zip(found, weights.astype(int), strict=True):
        wanted = roc_auc_score(np.repeat(positive, row), np.repeat(scores, row))
        assert value == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("classes", [2, 4])
def test_values_of_classes_are_their_indicators(classes: int) -> None:
    torch.manual_seed(40127)
    outputs = torch.randn(90, classes).double()
    targets = (torch.rand(90) < 0.2).long() * torch.randint(1, classes, (90,))
    found = intervals_of(outputs.softmax(dim=1), targets, CLASS)
    wanted = indicators_of(outputs.softmax(dim=1), targets, CLASS) | uneven_scores(outputs, targets)
    assert found.keys() == {"accuracy", "loss", "balanced_accuracy", "auc"}
    for name, (value, low, high) in found.items():
        assert value == pytest.approx(wanted[name], abs=1e-9)
        assert low < value < high


def test_values_of_labels_and_numbers_are_their_indicators() -> None:
    torch.manual_seed(40127)
    labels, pairs = Target(LABELS, ("a", "b")), Target(NUMBERS, ("a", "b"), (0.0, 1.0), (5.0, 9.0))
    said, held = torch.rand(70, 2).double(), (torch.rand(70, 2) < 0.4).float()
    of_labels = intervals_of(said, held, labels)
    wanted = indicators_of(said, held, labels)
    numbers = torch.rand(70, 2) * 2 - 1
    of_numbers = intervals_of(said, numbers, pairs)
    each = number_scores(said, pairs.in_units(numbers))
    wanted |= {name: sum(one[name] for one in each) / 2 for name in ("r2", "mae")}
    for name, (value, *_) in (of_labels | of_numbers).items():
        assert value == pytest.approx(wanted[name], abs=1e-6)
    assert {*of_labels, *of_numbers} == {"accuracy", "auc", "loss", "r2", "mae"}


def test_an_interval_holds_the_truth_about_95_times_in_100_also_of_owners() -> None:
    draws = np.random.default_rng(40127)
    held = {True: 0, False: 0}
    for _ in range(100):
        right = np.repeat(draws.random(80) < 0.7, 5)  # five rows each, alike
        said = torch.from_numpy(np.stack([right, ~right], axis=1).astype(float))
        owners = torch.arange(80).repeat_interleave(5)
        targets = torch.zeros(400, dtype=torch.int64)
        for known in held:
            _, low, high = intervals_of(said, targets, CLASS, owners=owners if known else None)[
                "accuracy"
            ]
            held[known] += low <= 0.7 <= high
    # 95 of 100 have a deviation of 2.2; rows taken for people hold it in 50 to 65
    assert held[True] >= 88
    assert held[False] < 80


@pytest.mark.parametrize("said", [[[0.5, 0.5]], [[0.5, 0.5], [float("nan"), 0.5]]])
def test_one_example_or_outputs_that_are_not_finite_have_none(said: list[list[float]]) -> None:
    targets = torch.zeros(len(said), dtype=torch.int64)
    assert intervals_of(torch.tensor(said), targets, CLASS) == {}


def test_sequences_and_a_score_that_resamples_lack_have_none() -> None:
    said = torch.rand(30, 3, 4)
    targets = torch.zeros(30, 4, dtype=torch.int64)
    assert intervals_of(said, targets, Target(SEQUENCES, length=4)) == {}
    single = intervals_of(torch.rand(30, 2), torch.zeros(30, dtype=torch.int64), CLASS)
    assert "auc" not in single


@pytest.mark.usefixtures("no_program")
def test_report_card_and_predict_show_the_same_intervals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_project(tmp_path, people=60)
    run, out = folder / "run", folder / "out"
    words = ["experiment=table", f"data.path={folder}", "data.num_clients=60", "rounds=2"]
    simulate(*load_asked([*words, "seed=40127", f"output_dir={run}"]))
    found = json.loads((run / "score_intervals.json").read_text())
    saved, test = load_model(run), task_of(run).test
    assert test.owners is not None
    said = predicted(saved, test.inputs)
    again = intervals_of(said, test.targets, saved.shape.target, owners=test.owners)
    _, low, high = again["auc"]
    assert found["auc"] == pytest.approx(again["auc"], abs=1e-6)
    within = f"{low:.4f} to {high:.4f}"
    assert report([str(run)]) == 0
    assert f"<td>{within}</td>" in (run / "report.html").read_text()
    assert export([str(run), str(out)]) == 0
    assert f" | {within} |" in (out / "README.md").read_text()
    assert predict([str(run)]) == 0
    assert f"({within})" in capsys.readouterr().out
