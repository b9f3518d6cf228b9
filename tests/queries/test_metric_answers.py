from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from discreet.data.examples import TaskShape
from discreet.data.targets import CLASSES, LABELS, NUMBERS, SEQUENCES, Target
from discreet.per_example.objective import PADDING
from discreet.queries.answers import Block
from discreet.queries.metric_answers import metric_blocks, metrics_of
from discreet.queries.query import Query

TWO = TaskShape((4,), 2)
TEN = TaskShape((4,), 10)
LABELLED = TaskShape((4,), 0, target=Target(LABELS, ("a", "b", "c")))
NUMBERED = TaskShape((4,), 0, target=Target(NUMBERS, ("a", "b"), (0.0, 10.0), (4.0, 30.0)))
TAGGED = TaskShape((5,), 3, num_tokens=7, target=Target(SEQUENCES, length=5))
SHAPES = {"two classes": TWO, "ten classes": TEN, "labels": LABELLED, "numbers": NUMBERED, "sequences": TAGGED}
EACH = [(shape, name) for shape in SHAPES for name in metrics_of(SHAPES[shape].target.kind)]
HUGE = torch.finfo(torch.float32).max
OUTPUTS = {"zeros": 0.0, "NaN": math.nan, "inf": math.inf, "-inf": -math.inf, "huge": HUGE, "-huge": -HUGE}


def query(shape: TaskShape, *names: str) -> Query:
    return Query(metric_blocks(names, shape))


def targets_of(shape: TaskShape, kind: str, n: int) -> Tensor:
    if shape.target.kind == CLASSES:
        return torch.zeros(n, dtype=torch.int64) if kind == "one" else torch.arange(n) % shape.num_classes
    if shape.target.kind == SEQUENCES:
        if kind == "one":
            return torch.full((n, 5), PADDING)
        return torch.where(torch.arange(5) < torch.arange(n)[:, None] % 6, torch.arange(5 * n).view(n, 5) % 3, PADDING)
    low = 0.0 if shape.target.kind == LABELS else -1.0
    both = torch.full((n, shape.num_outputs), low)
    both[::2] = 1.0 if kind == "both" else low
    return both


@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize(("shape", "name"), EACH)
def test_no_client_passes_a_norm_of_one_whatever_its_model_gives(shape: str, name: str, outputs: str) -> None:
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
    # The bound is true of the block itself: joining shortens nothing, which would bend what is read.
    (block,) = metric_blocks([name], SHAPES[shape])
    source = torch.Generator().manual_seed(61121)
    for scale in (0.0, 1.0, 40.0):
        values = torch.randn(9, *SHAPES[shape].output_shape, generator=source).double() * scale
        targets = targets_of(SHAPES[shape], "both", 9)
        raw = block.answer(values, targets)
        assert torch.allclose(Query((block,)).answer(values, targets), raw / block.bound, atol=1e-12)
        assert float(raw.abs().sum()) <= block.l1_bound + 1e-12
        assert not block.shares or bool((raw >= 0).all())


def test_a_block_that_lies_about_its_bound_is_held_to_it() -> None:
    faulty = (
        Block("long", 2, 1.0, 1.0, lambda *_: torch.tensor([30.0, 40.0]).double(), read=lambda _: {}),
        Block("bad", 1, 1.0, 1.0, lambda *_: torch.tensor([math.nan]).double(), read=lambda _: {}),
    )
    answer = Query(faulty).answer(torch.zeros(1, 1), torch.zeros(1))
    assert torch.allclose(answer, torch.tensor([0.6, 0.8, 0.0]).double() / math.sqrt(2))


def test_a_sequence_adds_its_own_share_and_moves_no_others() -> None:
    # One example of n moves the answer by at most 1 / n, however many positions it has: clients noise it for that.
    asked, n = query(TAGGED, "accuracy", "loss"), 7
    targets = targets_of(TAGGED, "both", n)
    values = torch.randn(n, 3, 5, generator=torch.Generator().manual_seed(90371)).double() * 9
    there = asked.answer(values, targets)
    for row in range(n):
        for other in (torch.full((5,), PADDING), targets[row].clamp(max=0), torch.arange(5) % 3):
            changed = targets.clone()
            changed[row] = other
            assert float((there - asked.answer(values, changed)).norm()) <= 2 / n
    one = query(TAGGED, "accuracy").answer(values[:2], torch.tensor([[0, 1, *[PADDING] * 3], [2] * 5]))
    right = (values[:2].argmax(dim=1) == torch.tensor([[0, 1, -1, -1, -1], [2] * 5])).double()
    assert float(one) == pytest.approx(float((right[0, :2].mean() + right[1].mean()) / 2 - 0.5) * 2)


def test_an_output_that_is_no_number_is_the_worst_answer() -> None:
    nan, target = torch.full((3, 2), math.nan), torch.zeros(3, dtype=torch.int64)
    assert float(query(TWO, "accuracy").answer(nan, target)) == -1
    assert float(query(TWO, "loss").answer(nan, target)) == 1
    assert float(query(NUMBERED, "mae").answer(nan, torch.zeros(3, 2))) == 1
