"""ROC curves and AUC from histograms of scores: against scikit-learn on the same scores, and within their errors."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import Tensor

from discreet.data.examples import TaskShape
from discreet.data.targets import LABELS, Target
from discreet.evaluation.private_evaluation import RocPoint, roc_points
from discreet.queries.metric_answers import LARGEST_LOGIT, SCORE_BINS, metric_blocks
from discreet.queries.query import Query, Sums

SHAPES = {
    "two classes": TaskShape((4,), 2),
    "four classes": TaskShape((4,), 4),
    "labels": TaskShape((4,), 0, target=Target(LABELS, ("a", "b", "c"))),
}
CLIENTS, EACH, DRAWS = 400, 40, 200


@functools.cache
def population(kind: str) -> tuple[Tensor, Tensor]:
    """Outputs (clients, 40, k) and targets of clients on whose data a model is good for some and poor for others."""
    draw, shape = torch.Generator().manual_seed(50387), SHAPES[kind]
    skill = torch.rand(CLIENTS, 1, 1, generator=draw) * 1.5 + 0.3
    outputs = torch.randn(CLIENTS, EACH, shape.num_outputs, generator=draw)
    if kind == "labels":
        labels = torch.randint(0, 2, outputs.shape, generator=draw).float()
        return outputs + (2 * labels - 1) * skill, labels
    targets = torch.randint(0, shape.num_classes, (CLIENTS, EACH), generator=draw)
    return outputs + skill * torch.nn.functional.one_hot(targets, shape.num_classes), targets


def scores_of(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """The scores (n, curves) of all examples, in logits, and whether each is a positive."""
    outputs, targets = (part.flatten(0, 1).double().numpy() for part in population(kind))
    if kind == "labels":
        return outputs, targets
    chances = np.exp(outputs) / np.exp(outputs).sum(axis=1, keepdims=True)
    logits, positive = np.log(chances / (1 - chances)), targets[:, None] == np.arange(outputs.shape[1])
    return (logits[:, 1:], positive[:, 1:]) if kind == "two classes" else (logits, positive)


def query(kind: str) -> Query:
    return Query(metric_blocks(["auc"], SHAPES[kind]))


def answers_of(kind: str) -> Tensor:
    return torch.stack([query(kind).answer(*client) for client in zip(*population(kind), strict=True)])


def points(kind: str, mean: Tensor, stddev: float) -> dict[str, list[RocPoint]]:
    found: dict[str, list[RocPoint]] = {}
    (part,) = query(kind).noised(Sums(mean.tolist(), 1.0, stddev))
    for point in roc_points(part):
        found.setdefault(point.of, []).append(point)
    return found


@pytest.mark.parametrize("kind", SHAPES)
def test_without_noise_the_points_are_those_of_the_scores_themselves(kind: str) -> None:
    curves = points(kind, answers_of(kind).mean(dim=0), 0.0)
    scores, positive = scores_of(kind)
    assert len(curves) == scores.shape[1]
    for place, curve in enumerate(curves.values()):
        assert [point.score for point in curve] == np.linspace(LARGEST_LOGIT, -LARGEST_LOGIT, SCORE_BINS + 1).tolist()
        for point in curve[1:-1]:  # the last bins on both sides hold what lies beyond them
            called = scores[:, place] >= point.score
            rates = called[positive[:, place] == 0].mean(), called[positive[:, place] == 1].mean()
            # float32 outputs may fall to the other side of an edge
            assert (point.false_positive_rate, point.true_positive_rate) == pytest.approx(rates, abs=3e-4)
        ends = [(each.false_positive_rate, each.true_positive_rate) for each in (curve[0], curve[-1])]
        assert ends == [(0, 0), (1, 1)]


def test_auc_of_several_classes_is_the_macro_average_of_one_against_the_rest() -> None:
    from sklearn.metrics import roc_auc_score

    outputs, targets = (part.flatten(0, 1) for part in population("four classes"))
    chances = outputs.double().softmax(dim=1).numpy()
    exact = roc_auc_score(targets.numpy(), chances, multi_class="ovr", average="macro")
    mean = answers_of("four classes").mean(dim=0)
    read = query("four classes").read(Sums(mean.tolist(), 1.0, 0.0))["auc"].value
    scores, positive = scores_of("four classes")
    steps = np.floor(scores.clip(-8, 7.9) * 2)  # ties in a step of half a logit count by half
    binned = np.mean([roc_auc_score(positive[:, place], steps[:, place]) for place in range(4)])
    assert read == pytest.approx(binned, abs=1e-4)
    assert read == pytest.approx(exact, abs=4e-3)


@pytest.mark.parametrize("probability", [1.0, 0.4], ids=["everybody", "sampled"])
def test_auc_of_several_classes_is_within_two_standard_errors_in_19_of_20_draws(probability: float) -> None:
    answers, z = answers_of("four classes"), 0.6
    auc, draw = query("four classes"), torch.Generator().manual_seed(70393)
    exact = auc.read(Sums(answers.mean(dim=0).tolist(), 1.0, 0.0))["auc"].value
    expected, within, half = probability * CLIENTS, 0, 0
    for _ in range(DRAWS):
        asked = (torch.rand(CLIENTS, generator=draw) < probability).double()
        total = asked @ answers + torch.randn(answers.shape[1], generator=draw).double() * z
        found = auc.read(Sums(total.tolist(), expected, z, probability))["auc"]
        within += abs(found.value - exact) <= 2 * found.standard_error
        half += abs(found.value - exact) <= found.standard_error
    assert within >= 183  # 0.9545 of 200 is 190.9
    assert probability < 1 or half < 170  # half the standard error would be found out
