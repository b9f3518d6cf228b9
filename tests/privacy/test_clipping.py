"""Clipping bounds every row, and one row moves a sum by at most the clip norm, whatever it is."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats
from torch import Tensor

from discreet.privacy import clipping
from discreet.privacy.clipping import ClippedSum, clip_by_norm, clip_factors, clip_to_grid
from discreet.privacy.grid import grid_for
from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.randomness import seeded_source
from discreet.privacy.secure_grid import SecureCohort, SecureSum, example_secure_sum, secure_sum

WILD = st.floats(width=32, allow_nan=True, allow_infinity=True)
ROWS = arrays(np.float32, st.tuples(st.integers(0, 6), st.integers(1, 8)), elements=WILD)
CLIPS = st.floats(1e-3, 1e3)
DTYPES = st.sampled_from([torch.float16, torch.float32, torch.float64])
UPDATES = st.lists(
    st.floats(-1e6, 1e6, width=32) | st.sampled_from([0.0, 1e-45, 0.1, 1.0]),
    min_size=1,
    max_size=20,
)


def exact_norm(row: torch.Tensor, order: float) -> float:
    values = [abs(value) for value in row.double().tolist()]
    return (
        math.fsum(values) if order == 1 else math.sqrt(math.fsum(value * value for value in values))
    )


@given(rows=ROWS, clip_norm=CLIPS, order=st.sampled_from([1, 2]))
def test_no_row_leaves_with_more_than_the_clip_norm(
    rows: np.ndarray, clip_norm: float, order: int
) -> None:
    clipped, norms = clip_by_norm(torch.from_numpy(rows), clip_norm, order=order)
    assert all(exact_norm(row, order) <= clip_norm for row in clipped)
    wild = ~np.isfinite(rows).all(axis=1)
    assert not clipped[wild].any()
    assert torch.isinf(norms[wild]).all()


@given(
    norms=st.lists(st.floats(0, 2.0**100, width=32), min_size=1),
    clip_norm=st.floats(1e-30, 1e20) | st.sampled_from([0.0, math.inf]),
    error=st.floats(-1e-6, 1e-6),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_a_row_whose_norm_was_off_by_a_millionth_ends_within_the_clip_norm(
    norms: list[float], clip_norm: float, error: float, dtype: torch.dtype
) -> None:
    exact = torch.tensor(norms, dtype=torch.float64)
    factors = clip_factors((exact * (1 + error)).to(dtype), clip_norm)
    assert bool(((exact * factors).to(dtype).double() <= clip_norm).all())
    assert bool((factors[exact <= clip_norm * (1 - 4e-6)] == 1).all()) or clip_norm == 0


def summed(kind: str, rows: torch.Tensor, clip_norm: float) -> ClippedSum:
    size = rows.shape[1]
    total = ClippedSum(size, clip_norm, grid=grid_for(clip_norm, size) if kind == "grid" else None)
    total.add(rows)
    return total


@given(rows=ROWS, clip_norm=CLIPS, dtype=DTYPES)
def test_removing_one_update_moves_the_grid_sum_by_at_most_the_clip_norm_exactly(
    rows: np.ndarray, clip_norm: float, dtype: torch.dtype
) -> None:
    updates = torch.from_numpy(rows).to(dtype)
    step = grid_for(clip_norm, rows.shape[1]).step
    total = summed("grid", updates, clip_norm).total / step
    for index in range(len(updates)):
        rest = (
            summed("grid", torch.cat([updates[:index], updates[index + 1 :]]), clip_norm).total
            / step
        )
        assert sum(int(moved) ** 2 for moved in total - rest) <= (clip_norm / step) ** 2


@pytest.mark.parametrize("excess", [1, 2**10, 2**16])
def test_an_update_over_the_clip_by_one_step_on_the_grid_is_clipped(excess: int) -> None:
    """Squared norms, in steps: the clip's is 2^36, and what is over it by one, by 1e-8 and by 1e-6
    is cut."""
    grid = grid_for(1.0, 2**16)
    row = torch.zeros(2**16, dtype=torch.float64)
    row[0], row[1 : excess + 1] = 1.0, grid.step
    assert int(1 / grid.step) ** 2 == 2**36
    assert sum(step**2 for step in clip_to_grid(row, 1.0, grid=grid).tolist()) <= 2**36


@pytest.mark.parametrize("excess", [1e-12, 1e-6, 1e-4])
@pytest.mark.parametrize("size", [3, clipping.CHUNK + 3])
def test_an_update_over_the_clip_by_little_is_clipped_in_a_float_sum(
    size: int, excess: float
) -> None:
    row = torch.zeros(1, size, dtype=torch.float64)
    row[0, 1] = 0.3 * (1 + excess)
    assert float(summed("float", row, 0.3).total[1]) <= 0.3


def test_every_value_released_from_a_grid_lies_on_it() -> None:
    total = summed("grid", seeded_source(27827).normal(300).view(3, 100), 1.0)
    steps = total.noised(Gaussian(1.0), seeded_source(411)) / grid_for(1.0, 100).step
    assert torch.equal(steps, steps.round())


@given(rows=ROWS, clip_norm=CLIPS, dtype=DTYPES)
def test_a_float_sum_is_that_of_the_clipped_rows(
    rows: np.ndarray, clip_norm: float, dtype: torch.dtype
) -> None:
    updates = torch.from_numpy(rows).to(dtype)
    clipped, _ = clip_by_norm(updates.double(), clip_norm)
    singly = summed("float", updates[:1], clip_norm)
    for row in updates[1:]:
        singly.add(row.unsqueeze(0))
    for total in (summed("float", updates, clip_norm).total, singly.total):
        assert torch.allclose(total, clipped.sum(0), atol=1e-12 * clip_norm)


@pytest.mark.parametrize("kind", ["float", "grid"])
def test_an_update_of_many_tiles_is_added_like_one_of_few(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = seeded_source(54277).normal(600).view(3, 200) * torch.tensor([[1.0], [0.01], [5.0]])
    rows[1, 7] = torch.nan
    at_once = summed(kind, rows, 2.0).total
    monkeypatch.setattr(clipping, "CHUNK", 64)
    assert torch.allclose(summed(kind, rows, 2.0).total, at_once, atol=2.0 / 1000)


@given(UPDATES, CLIPS, st.sampled_from([1, 2]))
def test_a_held_norm_is_at_most_the_clip_in_exact_arithmetic(
    values: list[float], clip_norm: float, order: int
) -> None:
    grid = grid_for(clip_norm, len(values))
    steps = clip_to_grid(torch.tensor(values), clip_norm, grid=grid, order=order)
    assert (
        sum(abs(step) ** order for step in steps.tolist())
        <= Fraction(clip_norm / grid.step) ** order
    )
    assert not clip_to_grid(
        torch.tensor([*values, math.nan]), clip_norm, grid=grid, order=order
    ).any()


@given(
    UPDATES, CLIPS, st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])
)
def test_truncation_never_moves_a_coordinate_away_from_zero(
    values: list[float], clip_norm: float, dtype: torch.dtype
) -> None:
    grid = grid_for(clip_norm, len(values))
    exact = torch.tensor(values, dtype=torch.float64)
    update = (exact * (0.9 * clip_norm / max(1e-300, float(exact.norm())))).to(dtype)
    for value, steps in zip(
        update.tolist(), clip_to_grid(update, clip_norm, grid=grid).tolist(), strict=True
    ):
        assert (
            abs(steps * Fraction(grid.step))
            <= abs(Fraction(value))
            < (abs(steps) + 1) * Fraction(grid.step)
        )
        assert steps * value >= 0


COHORT = SecureCohort(10, 7)
cohorts = st.integers(3, 100).flatmap(
    lambda n: st.builds(SecureCohort, st.just(n), st.integers(1 + n // 3, n))
)
noises = st.floats(0.05, 8.0)
sums = st.builds(
    secure_sum,
    st.integers(1, 300),
    cohorts,
    noise_multiplier=noises,
    count_stddev=st.none() | st.floats(0.6, 5),
    answers=st.none() | st.tuples(st.integers(1, 4), st.floats(0.5, 20)),
)
updates = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40)


def made(num_params: int = 100, **given: float | None) -> SecureSum:
    return secure_sum(num_params, COHORT, **{"noise_multiplier": 1.0, "count_stddev": 0.9, **given})  # type: ignore[arg-type]


def exact_squares(vector: Tensor) -> int:
    return sum(int(value) ** 2 for value in vector.tolist())


@settings(max_examples=60)
@given(sums)
def test_the_largest_sum_with_twelve_deviations_of_noise_does_not_wrap_around(
    grid: SecureSum,
) -> None:
    largest = max(grid.clip_steps, grid.bit_steps, grid.answer_steps)
    total = grid.nodes * largest + math.floor(12 * math.sqrt(grid.nodes * grid.variance))
    for value in (total, -total):
        assert int(grid.centred(torch.tensor([value % 2**grid.bits]))[0]) == value
    assert 16 <= grid.bits <= 24


@settings(max_examples=60)
@given(
    st.integers(10, 300),
    cohorts,
    st.floats(0.5, 4),
    st.floats(0.6, 5),
    st.tuples(st.integers(1, 4), st.floats(0.5, 9)),
)
def test_update_bit_and_answer_cost_at_most_the_one_gaussian_that_they_make_together(
    size: int, cohort: SecureCohort, noise: float, count: float, answers: tuple[int, float]
) -> None:
    grid = secure_sum(size, cohort, noise_multiplier=noise, count_stddev=count, answers=answers)
    wanted = (
        1 / Fraction(noise) ** 2 + 1 / (2 * Fraction(count)) ** 2 + 1 / Fraction(answers[1]) ** 2
    )
    cost = Fraction(grid.sensitivity_squared, cohort.summands * grid.variance)
    assert cost <= wanted <= cost * Fraction(101, 100)


@settings(max_examples=40)
@given(updates, st.booleans(), st.lists(st.floats(-9, 9), min_size=3, max_size=3))
def test_zeroing_out_a_client_moves_the_sum_by_at_most_the_sensitivity(
    values: list[float], below: bool, answer: list[float]
) -> None:
    grid = secure_sum(len(values), COHORT, noise_multiplier=1.0, count_stddev=0.7, answers=(3, 2.0))
    moved = grid.encode(torch.tensor(values), 0.3, below=below, answer=torch.tensor(answer))
    nothing = grid.encode(torch.zeros(len(values)), 0.3)
    assert exact_squares(moved - nothing) <= grid.sensitivity_squared


@settings(max_examples=60)
@given(st.integers(1, 60), st.integers(1, 40), st.integers(0, 2**31), st.floats(1e-3, 1e3))
def test_an_example_moves_its_clients_sum_by_at_most_the_sensitivity(
    size: int, count: int, seed: int, clip_norm: float
) -> None:
    grid = example_secure_sum(size, SecureCohort(4, 2), noise_multiplier=8.0, largest_sum=40)
    rows = torch.randn(
        count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    rows *= clip_norm / rows.norm(dim=1, keepdim=True).clamp(min=1e-9)
    moved = grid.encode_gradients(rows.sum(dim=0), clip_norm) - grid.encode_gradients(
        rows[1:].sum(dim=0), clip_norm
    )
    assert exact_squares(moved) <= grid.sensitivity_squared <= grid.clip_steps**2 * 1.02


def test_truncation_can_exceed_the_clip_norm_and_the_sensitivity_counts_it() -> None:
    grid = example_secure_sum(16, SecureCohort(4, 2), noise_multiplier=8.0, largest_sum=2)
    steps = torch.full((16,), 1000.001, dtype=torch.float64)
    steps[15] = math.sqrt(grid.clip_steps**2 - 15 * 1000.001**2)
    others = steps.ceil() - steps  # with the example each coordinate is a whole step more
    moved = grid.encode_gradients((steps + others) / grid.clip_steps, 1.0)
    moved -= grid.encode_gradients(others / grid.clip_steps, 1.0)
    assert steps.norm() <= grid.clip_steps
    assert grid.clip_steps**2 < exact_squares(moved) <= grid.sensitivity_squared


def test_the_range_of_examples_holds_all_of_them_at_the_bound_and_more_are_cut_off() -> None:
    grid = example_secure_sum(5, SecureCohort(4, 2), noise_multiplier=1.0, largest_sum=300)
    total = torch.tensor([300.0, -300.0, 0, 0, 301.0], dtype=torch.float64)
    encoded = 4 * grid.encode_gradients(total, 1.0)
    bound = 4 * 300 * grid.clip_steps
    assert encoded.tolist() == [bound, -bound, 0, 0, bound]
    assert torch.equal(grid.centred(encoded.remainder(2**grid.bits)), encoded)


def test_noise_of_the_accounted_clients_has_at_least_the_required_variance() -> None:
    grid = made(noise_multiplier=1.3)
    assert Fraction(grid.variance) * 7 >= (Fraction(1.3) * grid.clip_steps) ** 2
    assert Fraction(grid.variance - 1) * 7 < (Fraction(1.3) * grid.clip_steps) ** 2


def test_the_noise_that_is_drawn_has_the_variance_that_is_accounted() -> None:
    """Chi-square of 100,000 draws, false alarm 1e-9 both ways; 5 % less variance is rejected."""
    grid = made(100_000, count_stddev=None)
    drawn = float((grid.noise(seeded_source(64793)).double() ** 2).sum()) / grid.variance
    low, high = stats.chi2.ppf([5e-10, 1 - 5e-10], 100_000)
    assert low < drawn < high
    assert not low < drawn / 0.95 < high
