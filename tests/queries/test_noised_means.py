"""Private numbers and ROC curves are within their standard errors of the exact ones."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from discreet.data.examples import TaskShape
from discreet.data.targets import CLASSES, LABELS, NUMBERS, Target
from discreet.evaluation.private_evaluation import RocPoint, roc_points
from discreet.queries.metric_answers import LARGEST_LOGIT, SCORE_BINS, metric_blocks, metrics_of
from discreet.queries.query import Query, Sums

KINDS = {
    CLASSES: TaskShape((4,), 2),
    LABELS: TaskShape((4,), 0, target=Target(LABELS, ("a", "b", "c"))),
    NUMBERS: TaskShape((4,), 0, target=Target(NUMBERS, ("a", "b"), (0.0, 10.0), (4.0, 30.0))),
}
EACH = [(kind, name) for kind in KINDS for name in metrics_of(kind)]
DRAWS, CLIENTS = 200, 300
Client = tuple[Tensor, Tensor]


def population(kind: str) -> list[Client]:
    """Clients of 40 examples each, on whose data a model is good for some and poor for others."""
    source, found = torch.Generator().manual_seed(40177), []
    for _ in range(CLIENTS):
        skill = torch.rand((), generator=source) * 1.5 + 0.3
        if kind == CLASSES:
            targets = torch.randint(0, 2, (40,), generator=source)
            outputs = torch.randn(40, 2, generator=source)
            outputs[torch.arange(40), targets] += skill
        elif kind == LABELS:
            targets = torch.randint(0, 2, (40, 3), generator=source).float()
            outputs = torch.randn(40, 3, generator=source) + (2 * targets - 1) * skill
        else:
            targets = torch.rand(40, 2, generator=source) * 1.6 - 0.8
            outputs = targets + torch.randn(40, 2, generator=source) * 0.2 * skill
        found.append((outputs, targets))
    return found


def exact(kind: str, name: str, clients: list[Client]) -> dict[str, float]:
    """The same numbers, computed in the plain way from all clients' data."""
    from sklearn.metrics import r2_score, roc_auc_score

    outputs, targets = (torch.cat(parts).double() for parts in zip(*clients, strict=True))
    units = torch.tensor([2.0, 10.0], dtype=torch.float64)
    errors = (outputs.clamp(-1, 1) - targets).abs().clamp(0, 1) if kind == NUMBERS else outputs
    right = outputs.argmax(dim=1) == targets if kind == CLASSES else (outputs >= 0) == (targets == 1)
    if name == "accuracy":
        return {"accuracy": float(right.double().mean())}
    if name == "loss":  # of an example cut at twice the loss of chance
        chances = outputs.softmax(dim=1) if kind == CLASSES else outputs.sigmoid()
        said = chances[torch.arange(len(targets)), targets.long()] if kind == CLASSES else (1 - targets - chances).abs()
        return {"loss": float(np.minimum(-np.log(said.numpy()), 2 * math.log(2)).mean())}
    if name == "auc":
        scores = (outputs[:, 1] - outputs[:, 0])[:, None] if kind == CLASSES else outputs
        return {"auc": float(roc_auc_score(targets.squeeze().numpy(), scores.squeeze().numpy()))}
    if name == "mae":
        return {"mae": float((errors * units).mean())}
    if name == "rmse":
        return {"rmse": float((errors * units).square().mean().sqrt())}
    if name == "r2":
        return {"r2": float(r2_score(targets.numpy(), outputs.numpy()))}
    if name == "calibration":
        sure = outputs.softmax(dim=1).max(dim=1).values
        gap = np.histogram(sure.numpy(), 10, (0, 1), weights=(sure - right.double()).numpy())[0] / len(sure)
        return {"overconfidence": float(gap.sum()), "calibration_error": float(np.abs(gap).sum())}
    each = (errors if kind == NUMBERS else right.double()).reshape(CLIENTS, -1).mean(dim=1).numpy()
    worst = 0.9 if kind == NUMBERS else 0.1
    return {
        "clients_mean": float(each.mean()),
        "clients_worst_tenth": float(np.quantile(each, worst)),
        "clients_median": float(np.quantile(each, 0.5)),
    }


def query_of(kind: str, *names: str) -> Query:
    return Query(metric_blocks(names, KINDS[kind]))


def drawn(kind: str, name: str, *, scale: float = 1.0, probability: float = 1.0, z: float = 2.0) -> dict[str, int]:
    """How often, of 200 seeded draws, each number is within 2 of its standard errors, times `scale`, of the exact."""
    clients, source = population(kind), torch.Generator().manual_seed(90437)
    query, truth = query_of(kind, name), exact(kind, name, clients)
    answers = torch.stack([query.answer(*client) for client in clients])
    hits = dict.fromkeys(truth, 0)
    for _ in range(DRAWS):
        asked = (torch.rand(CLIENTS, generator=source) < probability).double()
        drawn = torch.randn(answers.shape[1], generator=source, dtype=torch.float64) * z
        read = query.read(Sums((asked @ answers + drawn).tolist(), probability * CLIENTS, z, probability))
        assert read.keys() == truth.keys()
        for found, value in truth.items():
            hits[found] += abs(read[found].value - value) <= 2 * scale * read[found].standard_error
    return hits


@pytest.mark.parametrize(("kind", "name"), EACH)
def test_a_private_number_is_within_two_standard_errors_of_the_exact_one_and_not_within_fewer(
    kind: str, name: str
) -> None:
    # 95.4 % of 200 is 191, with a standard deviation of 3; the seed is fixed.
    assert min(drawn(kind, name).values()) >= 183
    only_bounded = name in ("clients", "calibration")  # their standard errors are bounds
    hits = drawn(kind, name, scale=0.2 if only_bounded else 0.5).values()
    assert (min if only_bounded else max)(hits) < 170


SHAPES = {
    "two classes": TaskShape((4,), 2),
    "four classes": TaskShape((4,), 4),
    "labels": TaskShape((4,), 0, target=Target(LABELS, ("a", "b", "c"))),
}
RANKED, EXAMPLES, DRAWN = 400, 40, 200


@functools.cache
def ranked(kind: str) -> tuple[Tensor, Tensor]:
    """Outputs (clients, 40, k) and targets of clients on whose data a model is good for some and poor for others."""
    draw, shape = torch.Generator().manual_seed(50387), SHAPES[kind]
    skill = torch.rand(RANKED, 1, 1, generator=draw) * 1.5 + 0.3
    outputs = torch.randn(RANKED, EXAMPLES, shape.num_outputs, generator=draw)
    if kind == "labels":
        labels = torch.randint(0, 2, outputs.shape, generator=draw).float()
        return outputs + (2 * labels - 1) * skill, labels
    targets = torch.randint(0, shape.num_classes, (RANKED, EXAMPLES), generator=draw)
    return outputs + skill * torch.nn.functional.one_hot(targets, shape.num_classes), targets


def scores_of(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """The scores (n, curves) of all examples, in logits, and whether each is a positive."""
    outputs, targets = (part.flatten(0, 1).double().numpy() for part in ranked(kind))
    if kind == "labels":
        return outputs, targets
    chances = np.exp(outputs) / np.exp(outputs).sum(axis=1, keepdims=True)
    logits, positive = np.log(chances / (1 - chances)), targets[:, None] == np.arange(outputs.shape[1])
    return (logits[:, 1:], positive[:, 1:]) if kind == "two classes" else (logits, positive)


def query(kind: str) -> Query:
    return Query(metric_blocks(["auc"], SHAPES[kind]))


def answers_of(kind: str) -> Tensor:
    return torch.stack([query(kind).answer(*client) for client in zip(*ranked(kind), strict=True)])


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

    outputs, targets = (part.flatten(0, 1) for part in ranked("four classes"))
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
    expected, within, half = probability * RANKED, 0, 0
    for _ in range(DRAWN):
        asked = (torch.rand(RANKED, generator=draw) < probability).double()
        total = asked @ answers + torch.randn(answers.shape[1], generator=draw).double() * z
        found = auc.read(Sums(total.tolist(), expected, z, probability))["auc"]
        within += abs(found.value - exact) <= 2 * found.standard_error
        half += abs(found.value - exact) <= found.standard_error
    assert within >= 183  # 0.9545 of 200 is 190.9
    assert probability < 1 or half < 170  # half the standard error would be found out
