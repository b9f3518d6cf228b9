"""Sums of answers to a query, whole and in parts: what one client moves, and the noise that it is
released with."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from dp_accounting import DpEvent
from torch import Tensor

from discreet.accounting.events import joined_noise_multiplier, poisson_round_event
from discreet.mechanisms.sums import AnswerRelease, AnswerSum, CohortSum, UpdateRows
from discreet.planning.state import initial_state
from discreet.privacy.clipping import ClippedSum
from discreet.privacy.grid import Grid
from discreet.privacy.randomness import RandomSource, seeded_source
from discreet.protocol.messages import TrainReply
from discreet.settings.privacy import Sizes
from tests.mechanisms.made import central
from tests.node.clients import rejects_gaussian
from tests.replay import replay
from tests.rounds import query_of, round_of

Z, Z_ANSWERS, C = 1.3, 6.0, 0.5
JOINED = poisson_round_event(1.0, noise_multiplier=joined_noise_multiplier(Z, Z_ANSWERS))
NOISES = {
    "float": AnswerRelease(2, 5.0, Z_ANSWERS, event=JOINED),
    "grid": AnswerRelease(2, 5.0, Z_ANSWERS, noise="grid", event=JOINED),
    "secure sum": AnswerRelease(2, 5.0, Z_ANSWERS, noise="secure_sum", event=JOINED),
}
noises = pytest.mark.parametrize("how", NOISES.values(), ids=NOISES.keys())
ANSWERS = {
    "honest": torch.tensor([0.6, -0.8]),
    "huge": torch.tensor([1e30, 1e30]),
    "NaN": torch.tensor([math.nan, 0.1]),
    "infinite": torch.tensor([-math.inf, 0.1]),
    "missing": None,
}
OTHERS = [
    TrainReply(1, torch.tensor([0.1, 0.2, -0.3]), below=True, answer=torch.tensor([0.5, 0.5]))
]


def release(how: AnswerRelease, updates: list[TrainReply], source: RandomSource) -> object:
    return query_of(how, updates, source)


def joined(how: AnswerRelease, updates: list[TrainReply], source: RandomSource) -> object:
    user = replace(central(Z, 4.0, how.noise, rated=Z_ANSWERS), sizes=Sizes(3, how.length))
    # no first round rates what nobody has trained
    state = replace(initial_state(torch.zeros(3), clip_norm=C), round=1)
    state, metrics = round_of(user, state, updates, source)
    return [state, metrics.answers, metrics.fraction_below]


@noises
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
def test_one_client_more_or_less_moves_the_sum_of_answers_by_at_most_one(
    how: AnswerRelease, answer: Tensor | None
) -> None:
    with_it = [*OTHERS, TrainReply(1, torch.zeros(3), below=True, answer=answer)]
    for pair in ((with_it, OTHERS), (OTHERS, with_it)):
        found = replay(lambda updates, source: release(how, updates, source), *pair)
        assert found.faults == ()
        assert found.gaussian_distance <= (1 + 1e-9) / Z_ANSWERS


@noises
def test_update_bits_and_answer_of_the_worst_client_cost_exactly_the_joined_event(
    how: AnswerRelease,
) -> None:
    worst = TrainReply(1, torch.full((3,), 1e30), below=False, answer=torch.tensor([1e30, 0.0]))
    found = replay(lambda updates, source: joined(how, updates, source), [*OTHERS, worst], OTHERS)
    assert found.faults == ()
    assert len(found.shares) == 3
    assert found.gaussian_distance == pytest.approx(math.hypot(1 / Z, 1 / Z_ANSWERS), rel=1e-3)
    assert found.gaussian_distance <= (1 + 1e-9) / JOINED.noise_multiplier


@noises
def test_the_noise_on_the_sum_has_its_standard_deviation(how: AnswerRelease) -> None:
    many = AnswerRelease(4000, 5.0, Z_ANSWERS, how.noise)
    drawn = torch.tensor(AnswerSum(many).released(seeded_source(71917)).values)
    assert not rejects_gaussian(drawn, Z_ANSWERS)
    assert rejects_gaussian(drawn, 0.9 * Z_ANSWERS)
    assert rejects_gaussian(drawn, 1.1 * Z_ANSWERS)


def test_the_ledger_is_charged_before_anything_is_noised() -> None:
    def charge(event: DpEvent) -> None:
        raise OSError("the disk is full")

    class Unused:
        def __getattr__(self, name: str) -> object:
            raise AssertionError("noise was drawn")

    with pytest.raises(OSError, match="the disk is full"):
        query_of(NOISES["grid"], OTHERS, Unused(), charge)  # type: ignore[arg-type]


@noises
def test_parts_add_up_to_the_sum_of_all(how: AnswerRelease) -> None:
    rows = torch.tensor([[0.1, 0.2], [0.9, -0.3], [5.0, 0.0]])
    whole, first = AnswerSum(how), AnswerSum(how)
    whole.add(rows)
    first.add(rows[:2])
    second = AnswerSum(how)
    second.take(TrainReply(1, torch.zeros(1), below=True, answer=rows[2]))
    second.rows.values.add_(torch.tensor(first.part(), dtype=second.rows.values.dtype))
    assert second.part() == pytest.approx(whole.part())


GRIDS = [None, Grid(2.0**-20)]
ROWS = torch.randn(7, 5, generator=torch.Generator().manual_seed(8101))
BITS = torch.tensor([True, False, True, True, False, True, True])


def sum_of(grid: Grid | None, rows: slice) -> CohortSum:
    total = CohortSum(ClippedSum(5, 1.5, grid=grid))
    total.take(UpdateRows(ROWS[rows], BITS[rows]))
    return total


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("cut", [0, 3, 7])
def test_parts_make_the_whole(grid: Grid | None, cut: int) -> None:
    whole = sum_of(grid, slice(7)).part()
    total = CohortSum(ClippedSum(5, 1.5, grid=grid))
    for rows in (slice(cut), slice(cut, 7)):
        total.take(sum_of(grid, rows).part())
    part = total.part()
    assert (part.below, part.replies) == (whole.below, whole.replies) == (3, 7)
    torch.testing.assert_close(part.values, whole.values, rtol=0, atol=0 if grid else 1e-14)


def test_a_part_that_was_clipped_otherwise_is_refused() -> None:
    total, part = sum_of(None, slice(2)), sum_of(None, slice(2)).part()
    for other in (
        replace(part, clip_norm=2.0),
        replace(part, grid=Grid(1.0)),
        replace(part, values=part.values[:4]),
        replace(part, values=part.values.float()),
        sum_of(Grid(2.0**-20), slice(2)).part(),
    ):
        with pytest.raises(ValueError, match="must have the clip norm"):
            total.take(other)
    assert total.replies == 2
