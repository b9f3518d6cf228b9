"""Metrics: counted by hand, of norm 1 whatever a client's model gives, and near the exact ones
under noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import r2_score, roc_auc_score
from torch import Tensor, nn

from discreet.data.examples import Examples, TaskShape
from discreet.data.targets import CLASSES, LABELS, NUMBERS, SEQUENCES, Target
from discreet.per_example.objective import PADDING
from discreet.queries.answers import AnswerPart
from discreet.queries.metrics import evaluate, metric_blocks, metrics_of
from discreet.queries.query import Query, Sums
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


def test_numbers_have_r2_and_an_error_in_their_own_units() -> None:
    price = Target(NUMBERS, ("price",), (0.0,), (200.0,))
    table = Examples(
        torch.tensor([[-0.5], [0.0], [1.0]]), price.scaled(torch.tensor([[40.0], [110.0], [190.0]]))
    )
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


TWO = TaskShape((4,), 2)
TEN = TaskShape((4,), 10)
LABELLED = TaskShape((4,), 0, target=Target(LABELS, ("a", "b", "c")))
NUMBERED = TaskShape((4,), 0, target=Target(NUMBERS, ("a", "b"), (0.0, 10.0), (4.0, 30.0)))
TAGGED = TaskShape((5,), 3, num_tokens=7, target=Target(SEQUENCES, length=5))
SHAPES = {
    "two classes": TWO,
    "ten classes": TEN,
    "labels": LABELLED,
    "numbers": NUMBERED,
    "sequences": TAGGED,
}
EACH = [(shape, name) for shape in SHAPES for name in metrics_of(SHAPES[shape].target.kind)]
HUGE = torch.finfo(torch.float32).max
OUTPUTS = {
    "zeros": 0.0,
    "NaN": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "huge": HUGE,
    "-huge": -HUGE,
}


def query(shape: TaskShape, *names: str) -> Query:
    return Query(metric_blocks(names, shape))


def targets_of(shape: TaskShape, kind: str, n: int) -> Tensor:
    if shape.target.kind == CLASSES:
        return (
            torch.zeros(n, dtype=torch.int64)
            if kind == "one"
            else torch.arange(n) % shape.num_classes
        )
    if shape.target.kind == SEQUENCES:
        if kind == "one":
            return torch.full((n, 5), PADDING)
        return torch.where(
            torch.arange(5) < torch.arange(n)[:, None] % 6,
            torch.arange(5 * n).view(n, 5) % 3,
            PADDING,
        )
    low = 0.0 if shape.target.kind == LABELS else -1.0
    both = torch.full((n, shape.num_outputs), low)
    both[::2] = 1.0 if kind == "both" else low
    return both


@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize(("shape", "name"), EACH)
def test_no_client_passes_a_norm_of_one_whatever_its_model_gives(
    shape: str, name: str, outputs: str
) -> None:
    asked = query(SHAPES[shape], name)
    for kind in ("one", "both"):
        for n in (0, 1, 7):
            values = torch.full((n, *SHAPES[shape].output_shape), OUTPUTS[outputs])
            answer = asked.answer(values, targets_of(SHAPES[shape], kind, n))
            assert answer.shape == (asked.length,)
            assert answer.isfinite().all()
            assert float(answer.norm()) <= 1 + 1e-12 * n
    names = [each for at, each in EACH if at == shape]
    odd, source = torch.tensor([*OUTPUTS.values(), 3.0, -0.1]), torch.Generator().manual_seed(58211)
    for _ in range(9):  # all that mixed, and all metrics at once
        values = odd[torch.randint(len(odd), (9, *SHAPES[shape].output_shape), generator=source)]
        answer = query(SHAPES[shape], *names).answer(values, targets_of(SHAPES[shape], "both", 9))
        assert float(answer.norm()) <= 1 + 1e-12


@pytest.mark.parametrize(("shape", "name"), EACH)
def test_no_block_is_cut_by_the_bound_for_what_models_give(shape: str, name: str) -> None:
    # The bound is true of the block itself: joining shortens nothing, which would bend what is
    # read.
    (block,) = metric_blocks([name], SHAPES[shape])
    source = torch.Generator().manual_seed(61121)
    for scale in (0.0, 1.0, 40.0):
        values = torch.randn(9, *SHAPES[shape].output_shape, generator=source).double() * scale
        targets = targets_of(SHAPES[shape], "both", 9)
        raw = block.answer(values, targets)
        assert torch.allclose(
            Query((block,)).answer(values, targets), raw / block.bound, atol=1e-12
        )
        assert float(raw.abs().sum()) <= block.l1_bound + 1e-12
        assert not block.shares or bool((raw >= 0).all())


def test_a_block_that_lies_about_its_bound_is_held_to_it() -> None:
    faulty = (
        AnswerPart(
            "long", 2, 1.0, 1.0, lambda *_: torch.tensor([30.0, 40.0]).double(), read=lambda _: {}
        ),
        AnswerPart(
            "bad", 1, 1.0, 1.0, lambda *_: torch.tensor([math.nan]).double(), read=lambda _: {}
        ),
    )
    answer = Query(faulty).answer(torch.zeros(1, 1), torch.zeros(1))
    assert torch.allclose(answer, torch.tensor([0.6, 0.8, 0.0]).double() / math.sqrt(2))


def test_a_sequence_adds_its_own_share_and_moves_no_others() -> None:
    # One example of n moves the answer by at most 1 / n, however many positions it has: clients
    # noise it for that.
    asked, n = query(TAGGED, "accuracy", "loss"), 7
    targets = targets_of(TAGGED, "both", n)
    values = torch.randn(n, 3, 5, generator=torch.Generator().manual_seed(90371)).double() * 9
    there = asked.answer(values, targets)
    for row in range(n):
        for other in (torch.full((5,), PADDING), targets[row].clamp(max=0), torch.arange(5) % 3):
            changed = targets.clone()
            changed[row] = other
            assert float((there - asked.answer(values, changed)).norm()) <= 2 / n
    one = query(TAGGED, "accuracy").answer(
        values[:2], torch.tensor([[0, 1, *[PADDING] * 3], [2] * 5])
    )
    right = (values[:2].argmax(dim=1) == torch.tensor([[0, 1, -1, -1, -1], [2] * 5])).double()
    assert float(one) == pytest.approx(float((right[0, :2].mean() + right[1].mean()) / 2 - 0.5) * 2)


def test_an_output_that_is_no_number_is_the_worst_answer() -> None:
    nan, target = torch.full((3, 2), math.nan), torch.zeros(3, dtype=torch.int64)
    assert float(query(TWO, "accuracy").answer(nan, target)) == -1
    assert float(query(TWO, "loss").answer(nan, target)) == 1
    assert float(query(NUMBERED, "mae").answer(nan, torch.zeros(3, 2))) == 1


KINDS = {
    CLASSES: TaskShape((4,), 2),
    LABELS: TaskShape((4,), 0, target=Target(LABELS, ("a", "b", "c"))),
    NUMBERS: TaskShape((4,), 0, target=Target(NUMBERS, ("a", "b"), (0.0, 10.0), (4.0, 30.0))),
}
NOISED = [(kind, name) for kind in KINDS for name in metrics_of(kind)]
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


def exactly(kind: str, name: str, clients: list[Client]) -> dict[str, float]:
    """The same numbers, computed in the plain way from all clients' data."""
    from sklearn.metrics import r2_score, roc_auc_score

    outputs, targets = (torch.cat(parts).double() for parts in zip(*clients, strict=True))
    units = torch.tensor([2.0, 10.0], dtype=torch.float64)
    errors = (outputs.clamp(-1, 1) - targets).abs().clamp(0, 1) if kind == NUMBERS else outputs
    right = (
        outputs.argmax(dim=1) == targets if kind == CLASSES else (outputs >= 0) == (targets == 1)
    )
    if name == "accuracy":
        return {"accuracy": float(right.double().mean())}
    if name == "loss":  # of an example cut at twice the loss of chance
        chances = outputs.softmax(dim=1) if kind == CLASSES else outputs.sigmoid()
        said = (
            chances[torch.arange(len(targets)), targets.long()]
            if kind == CLASSES
            else (1 - targets - chances).abs()
        )
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
        gap = np.histogram(sure.numpy(), 10, (0, 1), weights=(sure - right.double()).numpy())[
            0
        ] / len(sure)
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


def hits_of(
    kind: str, name: str, *, scale: float = 1.0, probability: float = 1.0, z: float = 2.0
) -> dict[str, int]:
    """How often, of 200 seeded draws, each number is within 2 of its standard errors, times
    `scale`, of the exact."""
    clients, source = population(kind), torch.Generator().manual_seed(90437)
    query, truth = query_of(kind, name), exactly(kind, name, clients)
    answers = torch.stack([query.answer(*client) for client in clients])
    hits = dict.fromkeys(truth, 0)
    for _ in range(DRAWS):
        asked = (torch.rand(CLIENTS, generator=source) < probability).double()
        drawn = torch.randn(answers.shape[1], generator=source, dtype=torch.float64) * z
        read = query.read(
            Sums((asked @ answers + drawn).tolist(), probability * CLIENTS, z, probability)
        )
        assert read.keys() == truth.keys()
        for found, value in truth.items():
            hits[found] += abs(read[found].value - value) <= 2 * scale * read[found].standard_error
    return hits


@pytest.mark.parametrize(("kind", "name"), NOISED)
def test_a_private_number_is_within_two_standard_errors_and_not_within_fewer(
    kind: str, name: str
) -> None:
    # 95.4 % of 200 is 191, with a standard deviation of 3; the seed is fixed.
    assert min(hits_of(kind, name).values()) >= 183
    only_bounded = name in ("clients", "calibration")  # their standard errors are bounds
    hits = hits_of(kind, name, scale=0.2 if only_bounded else 0.5).values()
    assert (min if only_bounded else max)(hits) < 170


@pytest.mark.parametrize("largest", [1, 2, 3, 1000])
def test_an_answer_has_its_public_length_whatever_class_a_row_has(largest: int) -> None:
    query = Query(metric_blocks(["auc"], TaskShape((5,), 2)))
    answer = query.answer(torch.zeros(4, 2), torch.tensor([0, 1, 0, largest]))
    assert answer.shape == (query.length,)
    assert answer.norm() <= 1
