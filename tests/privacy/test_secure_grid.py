"""What a client puts into a masked sum: within the norm in exact integers, within 2^k as a sum, and read back right."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from discreet.privacy.randomness import seeded_source
from discreet.privacy.secure_grid import SecureCohort, SecureSum, example_secure_sum, secure_sum

COHORT = SecureCohort(10, 7)
cohorts = st.integers(3, 100).flatmap(lambda n: st.builds(SecureCohort, st.just(n), st.integers(1 + n // 3, n)))
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
def test_the_sum_of_all_clients_at_the_bound_and_twelve_deviations_of_noise_come_back_from_the_modulus(
    grid: SecureSum,
) -> None:
    largest = max(grid.clip_steps, grid.bit_steps, grid.answer_steps)
    total = grid.nodes * largest + math.floor(12 * math.sqrt(grid.nodes * grid.variance))
    for value in (total, -total):
        assert int(grid.centred(torch.tensor([value % 2**grid.bits]))[0]) == value
    assert 16 <= grid.bits <= 24


@settings(max_examples=60)
@given(
    st.integers(10, 300), cohorts, st.floats(0.5, 4), st.floats(0.6, 5), st.tuples(st.integers(1, 4), st.floats(0.5, 9))
)
def test_update_bit_and_answer_cost_at_most_the_one_gaussian_that_they_make_together(
    size: int, cohort: SecureCohort, noise: float, count: float, answers: tuple[int, float]
) -> None:
    grid = secure_sum(size, cohort, noise_multiplier=noise, count_stddev=count, answers=answers)
    wanted = 1 / Fraction(noise) ** 2 + 1 / (2 * Fraction(count)) ** 2 + 1 / Fraction(answers[1]) ** 2
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
    rows = torch.randn(count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows *= clip_norm / rows.norm(dim=1, keepdim=True).clamp(min=1e-9)
    moved = grid.encode_gradients(rows.sum(dim=0), clip_norm) - grid.encode_gradients(rows[1:].sum(dim=0), clip_norm)
    assert exact_squares(moved) <= grid.sensitivity_squared <= grid.clip_steps**2 * 1.02


def test_truncating_a_sum_can_move_it_by_more_than_the_clip_norm_which_the_sensitivity_counts() -> None:
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


def test_the_noise_of_the_accounted_clients_has_at_least_the_variance_that_was_asked_for() -> None:
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
