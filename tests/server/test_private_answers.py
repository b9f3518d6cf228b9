"""Statistics that all clients are asked for, and ROC curves of ratings: numbers, charges, and what
is written."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from torch import Tensor

from discreet.data.datasets import load_task
from discreet.data.examples import TaskShape
from discreet.data.targets import LABELS, Target
from discreet.ledger.durable_ledger import DurableLedger
from discreet.planning.plan import planned, resolve_noise
from discreet.privacy.clipping import ClippedSum
from discreet.privacy.randomness import RandomSource, seeded_source
from discreet.protocol.messages import TrainReply
from discreet.queries.answers import AnswerPart
from discreet.queries.metrics import LARGEST_LOGIT, SCORE_BINS, metric_blocks
from discreet.queries.query import Query, Sums, shape_of_data
from discreet.queries.statistic_answers import statistic_blocks
from discreet.run_files.compose import load_config
from discreet.server.data_questions import ask, statistics_noise
from discreet.server.resolve import resolve, with_range
from discreet.server.roc import RocPoint, roc_points
from discreet.server.run_context import RunContext
from discreet.settings.data import STATISTICS
from discreet.settings.settings import Settings
from tests.replay import replay
from tests.rounds import query_of

NOISY = [
    "data.name=breast_cancer",
    "data.num_clients=40",
    "privacy.delta=1e-3",
    "model.name=linear",
]
Client = tuple[Tensor, Tensor]


def config_of(*words: str) -> Settings:
    return load_config(
        [*NOISY, "data.normalise=private", "privacy.user.noise_multiplier=1", *words]
    )


def query(config: Settings, *names: str) -> Query:
    ranged = with_range(config.statistics, config.data.name, None)
    shape = shape_of_data(ranged, load_task(config.data.name).shape)
    return Query(statistic_blocks(names or ["moments"], shape))


def mechanism(config: Settings, asked: Query) -> Callable[[Sequence[Client], RandomSource], object]:
    how = statistics_noise(planned(config), asked.length)

    def run(clients: Sequence[Client], source: RandomSource) -> object:
        charged: list[object] = []
        # What a client sends is beyond the server's control: it is clipped there once more.
        parts = [
            TrainReply(1, torch.zeros(0), False, answer=asked.answer(*client).float())
            for client in clients
        ]
        return query_of(how, parts, source, charged.append), charged

    return run


def clients_with(*more: Client) -> list[Client]:
    source = torch.Generator().manual_seed(20771)
    honest = [
        (torch.rand(9, 30, generator=source) * 2 - 1, torch.randint(0, 2, (9,), generator=source))
        for _ in range(5)
    ]
    return [*honest, *more]


NAN, INF = torch.full((3, 30), torch.nan), torch.full((3, 30), torch.inf)
WORST = {
    "corner": torch.ones(4, 30),
    "other corner": -torch.ones(4, 30),
    "one example": torch.ones(1, 30),
    "many examples": torch.ones(5000, 30),
    "NaN": NAN,
    "infinity": INF,
    "huge": torch.full((3, 30), 1e38),
}


@pytest.mark.parametrize("noise", ["grid", "float"])
@pytest.mark.parametrize("inputs", WORST)
def test_one_client_more_moves_the_sum_by_at_most_what_the_noise_is_for(
    inputs: str, noise: str
) -> None:
    config, values = config_of(f"privacy.noise={noise}"), WORST[inputs]
    for names in (["moments"], STATISTICS):
        with_one = clients_with((values, torch.ones(len(values), dtype=torch.int64)))
        found = replay(mechanism(config, query(config, *names)), with_one, clients_with())
        assert found.faults == ()


def test_some_client_reaches_the_bound() -> None:
    config = config_of("privacy.noise=float")
    corner = clients_with((WORST["corner"], torch.ones(4, dtype=torch.int64)))
    found = replay(mechanism(config, query(config)), corner, clients_with())
    assert max(found.shares) == pytest.approx(1, abs=1e-5)


def test_without_the_servers_clip_an_answer_that_is_too_long_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ClippedSum, "add", lambda self, rows: self.total.add_(rows.double().sum(0)))
    config = config_of("privacy.noise=float")
    block = AnswerPart(
        "moments", 60, 1.0, 1.0, lambda *_: torch.ones(60, dtype=torch.float64), read=lambda _: {}
    )
    monkeypatch.setattr("discreet.queries.query.clipped_answer", lambda answer, bound: answer)
    liar = replace(query(config), blocks=(block,))
    corner = clients_with((WORST["corner"], torch.ones(4, dtype=torch.int64)))
    assert replay(mechanism(config, liar), corner, clients_with()).faults


def test_what_is_asked_again_is_noised_anew(tmp_path: Path) -> None:
    config = config_of("seed=51817")
    ledger, source = DurableLedger.create(tmp_path / "ledger.db"), seeded_source(51817)
    run = cast(RunContext, SimpleNamespace(plan=planned(config), ledger=ledger, source=source))
    first, second = (ask(run, query(config), [], name="statistics") for _ in range(2))
    assert first.values != second.values


def test_a_target_pays_for_it_too() -> None:
    asked = load_config(
        [
            *NOISY,
            "data.normalise=private",
            "privacy.user.target_epsilon=4",
            "statistics.noise_multiplier=2",
        ]
    )
    resolved, without = (
        resolve_noise(asked),
        resolve_noise(replace(asked, data=replace(asked.data, normalise="none"))),
    )
    z = resolved.privacy.user.noise_multiplier
    assert z is not None
    assert z > (without.privacy.user.noise_multiplier or 0) * 1.01
    spent = PLDAccountant()
    spent.compose(GaussianDpEvent(2.0)).compose(
        PoissonSampledDpEvent(0.3, GaussianDpEvent(z)), asked.rounds
    )
    assert spent.get_epsilon(1e-3) == pytest.approx(4, rel=2e-3)


def test_public_normalising_maps_the_public_range_to_minus_one_to_one() -> None:
    words = [
        "data.name=digits",
        "data.num_clients=20",
        "privacy.user.noise_multiplier=1",
        "privacy.user.too_noisy=warn",
    ]
    plan, task = resolve(load_config([*words, "data.normalise=public"]))
    assert (plan.run.normaliser.means, plan.run.normaliser.deviations) == ([0.5], [0.5])
    assert torch.equal(task.test.inputs, load_task("digits").test.inputs * 2 - 1)


SHAPES = {
    "two classes": TaskShape((4,), 2),
    "four classes": TaskShape((4,), 4),
    "labels": TaskShape((4,), 0, target=Target(LABELS, ("a", "b", "c"))),
}
CLIENTS, EACH, DRAWS = 400, 40, 200


@functools.cache
def population(kind: str) -> tuple[Tensor, Tensor]:
    """Outputs (clients, 40, k) and targets of clients on whose data a model is good for some and
    poor for others."""
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
    logits, positive = (
        np.log(chances / (1 - chances)),
        targets[:, None] == np.arange(outputs.shape[1]),
    )
    return (logits[:, 1:], positive[:, 1:]) if kind == "two classes" else (logits, positive)


def auc_of(kind: str) -> Query:
    return Query(metric_blocks(["auc"], SHAPES[kind]))


def answers_of(kind: str) -> Tensor:
    return torch.stack(
        [auc_of(kind).answer(*client) for client in zip(*population(kind), strict=True)]
    )


def points(kind: str, mean: Tensor, stddev: float) -> dict[str, list[RocPoint]]:
    found: dict[str, list[RocPoint]] = {}
    (part,) = auc_of(kind).noised(Sums(mean.tolist(), 1.0, stddev))
    for point in roc_points(part):
        found.setdefault(point.of, []).append(point)
    return found


@pytest.mark.parametrize("kind", SHAPES)
def test_without_noise_the_points_are_those_of_the_scores_themselves(kind: str) -> None:
    curves = points(kind, answers_of(kind).mean(dim=0), 0.0)
    scores, positive = scores_of(kind)
    assert len(curves) == scores.shape[1]
    for place, curve in enumerate(curves.values()):
        assert [point.score for point in curve] == np.linspace(
            LARGEST_LOGIT, -LARGEST_LOGIT, SCORE_BINS + 1
        ).tolist()
        for point in curve[1:-1]:  # the last bins on both sides hold what lies beyond them
            called = scores[:, place] >= point.score
            rates = called[positive[:, place] == 0].mean(), called[positive[:, place] == 1].mean()
            # float32 outputs may fall to the other side of an edge
            assert (point.false_positive_rate, point.true_positive_rate) == pytest.approx(
                rates, abs=3e-4
            )
        ends = [
            (each.false_positive_rate, each.true_positive_rate) for each in (curve[0], curve[-1])
        ]
        assert ends == [(0, 0), (1, 1)]


def test_auc_of_several_classes_is_the_macro_average_of_one_against_the_rest() -> None:
    from sklearn.metrics import roc_auc_score

    outputs, targets = (part.flatten(0, 1) for part in population("four classes"))
    chances = outputs.double().softmax(dim=1).numpy()
    exact = roc_auc_score(targets.numpy(), chances, multi_class="ovr", average="macro")
    mean = answers_of("four classes").mean(dim=0)
    read = auc_of("four classes").read(Sums(mean.tolist(), 1.0, 0.0))["auc"].value
    scores, positive = scores_of("four classes")
    steps = np.floor(scores.clip(-8, 7.9) * 2)  # ties in a step of half a logit count by half
    binned = np.mean([roc_auc_score(positive[:, place], steps[:, place]) for place in range(4)])
    assert read == pytest.approx(binned, abs=1e-4)
    assert read == pytest.approx(exact, abs=4e-3)


@pytest.mark.parametrize("probability", [1.0, 0.4], ids=["everybody", "sampled"])
def test_auc_of_several_classes_is_within_two_standard_errors_in_19_of_20_draws(
    probability: float,
) -> None:
    answers, z = answers_of("four classes"), 0.6
    auc, draw = auc_of("four classes"), torch.Generator().manual_seed(70393)
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
