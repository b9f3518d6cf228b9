"""The exact discrete Gaussian: its law is right, each decision is that of the real number, and its tails have no end.

Statistical tests draw from a seed fixed beforehand; their false-alarm rate over its choice is stated.
"""

from __future__ import annotations

import math
from itertools import repeat

import mpmath
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from discreet.privacy import discrete_gaussian as module
from discreet.privacy.discrete_gaussian import LARGEST_VARIANCE, discrete_gaussian
from discreet.privacy.grid import Grid
from discreet.privacy.randomness import LOW_63_BITS, seeded_source, signed

DRAWS = 400_000
RATE = 1e-9


def probabilities(variance: int, reach: int) -> NDArray[np.float64]:
    """Of -reach .. reach, by the definition."""
    weights = np.exp(-(np.arange(-reach, reach + 1.0) ** 2) / (2 * variance))
    return weights / weights.sum()


def chance_of_such_counts(drawn: torch.Tensor, variance: int) -> float:
    """The p-value of a chi-square test against N_Z(0, variance), integers put together until each bin expects 50."""
    reach = 12 * math.isqrt(variance) + 12
    exact = probabilities(variance, reach) * len(drawn)
    counts = np.bincount(drawn.clamp(-reach, reach).numpy() + reach, minlength=2 * reach + 1)
    bins = np.minimum(np.cumsum(exact) // 50, np.sum(exact) // 50 - 1).astype(int)
    wanted, found = np.bincount(bins, exact), np.bincount(bins, counts)
    kept = wanted > 0
    statistic = float(((found[kept] - wanted[kept]) ** 2 / wanted[kept]).sum())
    return float(stats.chi2.sf(statistic, int(kept.sum()) - 1))


@pytest.mark.parametrize("variance", [1, 3, 100, 2500])
def test_counts_are_those_of_the_discrete_gaussian(variance: int) -> None:
    """False alarm 1e-9 each. Variances 3 % off are told from it, and a Gaussian that was rounded where it differs."""
    drawn = discrete_gaussian(DRAWS, variance, seeded_source(64793))
    assert chance_of_such_counts(drawn, variance) > RATE
    for off in (97, 103):
        assert variance < 100 or chance_of_such_counts(drawn, variance * off // 100) < RATE
    rounded = Grid(1.0).gaussian(DRAWS, math.sqrt(variance), seeded_source(64793))
    assert variance > 3 or chance_of_such_counts(rounded, variance) < RATE


@pytest.mark.parametrize("variance", [2**20, 2**40 + 1, LARGEST_VARIANCE])
def test_large_variances_are_gaussian_in_law_and_right_in_variance(variance: int) -> None:
    """KS and chi-square, false alarm 1e-9 each; 3 % off the variance is rejected. Steps are 1/1000 of it or less."""
    drawn = discrete_gaussian(DRAWS, variance, seeded_source(64793)).double() / math.sqrt(variance)
    energy, (low, high) = float((drawn**2).sum()), stats.chi2.ppf([RATE / 2, 1 - RATE / 2], DRAWS)
    assert low < energy < high
    assert not low < energy * 1.03 < high
    assert stats.kstest(drawn.numpy()[:100_000], "norm").pvalue > RATE


@pytest.mark.parametrize("variance", [1, 50, 2**64])
def test_what_decides_whether_a_draw_is_kept_is_off_by_less_than_its_bound(variance: int) -> None:
    """In float64, for sizes up to 45 scales; the other side, -ln v, has its own test in test_grid_noise."""
    scale = math.isqrt(variance) + 1
    sizes = torch.linspace(0, 45, 500, dtype=torch.float64).mul_(scale).floor().long()
    floats = sizes.double().sub_(variance / scale).square_().div_(2.0 * variance).tolist()
    with mpmath.workdps(60):
        exact = [(mpmath.mpf(size) - mpmath.mpf(variance) / scale) ** 2 / (2 * variance) for size in sizes.tolist()]
        worst = max(abs(float(value - wanted)) for value, wanted in zip(floats, exact, strict=True))
    assert worst + 2.0**-43 < module.KEEP_ERROR


@pytest.mark.parametrize("scale", [1, 3, 2**20])
def test_a_size_is_the_floor_that_mpmath_finds_of_all_the_bits(scale: int) -> None:
    key = bytes(range(16))
    words = signed(seeded_source(83639).words(60))
    words[:3] = torch.tensor([0, 1, LOW_63_BITS])
    found = module._sizes(words.clone(), scale, key).tolist()
    with mpmath.workdps(90):
        for index, (word, size) in enumerate(zip(words.tolist(), found, strict=True)):
            bits = (word & LOW_63_BITS) << 64 | next(module._more_bits(key, index))
            assert size == int(mpmath.floor(-scale * mpmath.log((mpmath.mpf(bits) + 0.5) / mpmath.mpf(2) ** 127)))


def test_a_uniform_that_begins_with_any_number_of_zeros_still_has_its_logarithm() -> None:
    """The tails have no end: 63 + 3 * 64 zero bits, then ones, are -ln u = 255 ln 2 and a little."""
    more = iter([0, 0, 0, *repeat(2**64 - 1, 40)])
    found = module._settled(0, more, lambda low, high: module._floor(1000, low, high))
    assert found == int(1000 * 255 * math.log(2))


def test_a_uniform_on_the_edge_of_a_decision_gets_bits_until_it_is_past_it() -> None:
    """The binary digits of exp(-1) are followed for 63 + 2 * 64 of them: only what comes then decides."""
    with mpmath.workdps(200):
        digits = int(mpmath.floor(mpmath.exp(-1) * mpmath.mpf(2) ** 255))
    blocks = [digits >> 192, *(digits >> shift & (2**64 - 1) for shift in (128, 64, 0))]
    for last, size in ((0, 1), (2**64 - 1, 0)):
        more = iter([blocks[1], blocks[2], last, *repeat(last, 9)])
        assert module._settled(blocks[0], more, lambda low, high: module._floor(1, low, high)) == size
