"""Sums of clipped updates: one of them moves the sum by at most the clip norm."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from discreet.privacy import clipped_sum
from discreet.privacy.clipped_sum import LARGEST_TILE, SUMMED_AT_ONCE, ClippedSum, GridSum, surely_within
from discreet.privacy.clipping import clip_by_norm
from discreet.privacy.grid import grid_for
from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.randomness import seeded_source

WILD = st.floats(width=32, allow_nan=True, allow_infinity=True)
ROWS = arrays(np.float32, st.tuples(st.integers(0, 6), st.integers(1, 8)), elements=WILD)
CLIPS = st.floats(1e-3, 1e3)
DTYPES = st.sampled_from([torch.float16, torch.float32, torch.float64])


def summed(kind: str, rows: torch.Tensor, clip_norm: float) -> ClippedSum | GridSum:
    size = rows.shape[1]
    total = ClippedSum(size, clip_norm) if kind == "float" else GridSum(size, clip_norm, grid=grid_for(clip_norm, size))
    total.add(rows)
    return total


@given(rows=ROWS, norm_clip=CLIPS, dtype=DTYPES)
def test_removing_one_update_moves_the_float_sum_by_at_most_the_clip_norm(
    rows: np.ndarray, norm_clip: float, dtype: torch.dtype
) -> None:
    updates = torch.from_numpy(rows).to(dtype)
    total = summed("float", updates, norm_clip).total
    for index in range(len(updates)):
        rest = summed("float", torch.cat([updates[:index], updates[index + 1 :]]), norm_clip).total
        assert math.hypot(*(total - rest).tolist()) <= norm_clip * (1 + 1e-12)


@given(rows=ROWS, norm_clip=CLIPS, dtype=DTYPES)
def test_removing_one_update_moves_the_grid_sum_by_at_most_the_clip_norm_exactly(
    rows: np.ndarray, norm_clip: float, dtype: torch.dtype
) -> None:
    updates = torch.from_numpy(rows).to(dtype)
    total = summed("grid", updates, norm_clip)
    assert isinstance(total, GridSum)
    for index in range(len(updates)):
        rest = summed("grid", torch.cat([updates[:index], updates[index + 1 :]]), norm_clip)
        assert isinstance(rest, GridSum)
        moved = sum(int(step) ** 2 for step in total.steps - rest.steps)
        assert moved <= (norm_clip / total.grid.step) ** 2


@pytest.mark.parametrize("excess", [1, 2**10, 2**16])
def test_an_update_over_the_clip_by_one_step_on_the_grid_is_clipped(excess: int) -> None:
    """Squared norms, in steps: the clip's is 2^36, and what is over it by one, by 1e-8 and by 1e-6 is cut."""
    grid = grid_for(1.0, 2**16)
    row = torch.zeros(1, 2**16, dtype=torch.float64)
    row[0, 0], row[0, 1 : excess + 1] = 1.0, grid.step
    total = GridSum(2**16, 1.0, grid=grid)
    assert int(1 / grid.step) ** 2 == 2**36
    total.add(row)
    for steps in (total.steps, grid.quantise(row[0], 1.0)):
        assert sum(step**2 for step in steps.tolist()) <= 2**36


@pytest.mark.parametrize("excess", [1e-12, 1e-6, 1e-4])
@pytest.mark.parametrize("size", [3, LARGEST_TILE + 3])
def test_an_update_over_the_clip_by_little_is_clipped_in_a_float_sum(size: int, excess: float) -> None:
    row = torch.zeros(1, size, dtype=torch.float64)
    row[0, 1] = 0.3 * (1 + excess)
    assert float(summed("float", row, 0.3).total[1]) <= 0.3


@pytest.mark.parametrize("kind", ["float", "grid"])
def test_rows_at_once_and_one_by_one_add_up_to_the_same(kind: str) -> None:
    rows = seeded_source(66179).normal(50).view(5, 10)
    at_once, singly = summed(kind, rows, 1.0), summed(kind, rows[:1], 1.0)
    for row in rows[1:]:
        singly.add(row.unsqueeze(0))
    assert torch.allclose(at_once.total, singly.total, atol=1e-12)


def test_the_grid_costs_less_than_a_thousandth_of_the_clip_norm() -> None:
    rows = seeded_source(90031).normal(3000).view(1, 3000)
    exact, on_grid = summed("float", rows, 2.0).total, summed("grid", rows, 2.0).total
    assert (exact - on_grid).norm().item() < 2.0 / 1000


def test_every_value_released_from_a_grid_lies_on_it() -> None:
    total = summed("grid", seeded_source(27827).normal(300).view(3, 100), 1.0)
    assert isinstance(total, GridSum)
    steps = total.noised(Gaussian(1.0), seeded_source(411)) / total.grid.step
    assert torch.equal(steps, steps.round())


@pytest.mark.parametrize("kind", ["float", "grid"])
def test_no_updates_add_up_to_zero(kind: str) -> None:
    assert summed(kind, torch.zeros(0, 3), 1.0).total.tolist() == [0.0, 0.0, 0.0]


@given(rows=ROWS, norm_clip=CLIPS)
def test_a_float_sum_is_that_of_the_clipped_rows(rows: np.ndarray, norm_clip: float) -> None:
    updates = torch.from_numpy(rows)
    clipped, _ = clip_by_norm(updates.double(), norm_clip)
    assert torch.allclose(summed("float", updates, norm_clip).total, clipped.sum(0), atol=1e-12 * norm_clip)


@pytest.mark.parametrize("kind", ["float", "grid"])
def test_an_update_of_many_tiles_is_added_like_one_of_few(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = seeded_source(54277).normal(600).view(3, 200) * torch.tensor([[1.0], [0.01], [5.0]])
    rows[1, 7] = torch.nan
    at_once = summed(kind, rows, 2.0).total
    monkeypatch.setattr(clipped_sum, "CHUNK", 64)
    monkeypatch.setattr(clipped_sum, "LARGEST_TILE", 128)
    assert torch.allclose(summed(kind, rows, 2.0).total, at_once, atol=2.0 / 1000)


@pytest.mark.parametrize("shape", [(3,), (1, 4), (1, 2)])
def test_rows_of_another_size_are_refused(shape: tuple[int, ...]) -> None:
    for kind in ("float", "grid"):
        total = summed(kind, torch.zeros(0, 3), 1.0)
        with pytest.raises(ValueError, match="rows must be floating point of shape"):
            total.add(torch.zeros(shape))


@given(
    size=st.integers(1, 3 * SUMMED_AT_ONCE),
    clip_norm=st.floats(2.0**-32, 2.0**60) | st.just(math.inf),
    share=st.floats(0.99, 1.01) | st.floats(0, 2),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=200, deadline=None)
def test_what_float32_is_sure_of_is_so(size: int, clip_norm: float, share: float, seed: int) -> None:
    row = np.random.default_rng(seed).standard_cauchy(size)
    row = (row * (share * min(clip_norm, 1e15) / np.linalg.norm(row))).astype(np.float32)
    norm = np.linalg.norm(row.astype(np.float64))
    sure = surely_within(row, clip_norm)
    assert not (sure and norm > clip_norm)
    assert sure or norm > clip_norm * (1 - 2.0**-8) or clip_norm < 2.0**-30


@pytest.mark.parametrize("excess", [2.0**-20, 2.0**-12, 2.0**-10, 0.1])
@pytest.mark.parametrize("size", [1, 1000, 3 * SUMMED_AT_ONCE])
def test_float32_is_not_sure_of_a_norm_that_is_over_the_clip_by_little(size: int, excess: float) -> None:
    row = np.full(size, (1 + excess) / math.sqrt(size), dtype=np.float32)
    assert not surely_within(row, float(np.linalg.norm(row.astype(np.float64))) / (1 + excess / 2))
    assert surely_within(row, 1.2)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("clip_norm", [1.0, math.inf])
def test_float32_is_not_sure_of_what_is_not_finite(value: float, clip_norm: float) -> None:
    assert not surely_within(np.array([0.0, value], dtype=np.float32), clip_norm)


def test_a_long_row_that_is_surely_within_is_added_as_it_is() -> None:
    rows = torch.full((3, LARGEST_TILE + 5), 2.0**-12)
    rows[1, -1] = math.inf
    rows[2] *= 2.0**20
    total = ClippedSum(rows.shape[1], 1.0)
    total.add(rows)
    clipped, _ = clip_by_norm(rows, 1.0)
    assert surely_within(rows[0].numpy(), 1.0)
    torch.testing.assert_close(total.total, clipped.double().sum(0), rtol=1e-6, atol=0)
