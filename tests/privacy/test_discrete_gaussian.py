"""The exact samplers follow their laws; false-alarm rate of each test over the choice of seed: 1e-4."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import mpmath
import pytest
import torch
from scipy import stats

from discreet.privacy.grid import discrete_gaussian, discrete_laplace, rounded_normal
from discreet.privacy.randomness import seeded_source


def gaussian_chances(variance: Fraction) -> list[float]:
    weights = [mpmath.exp(-(x * x) / (2 * mpmath.mpf(variance.numerator) / variance.denominator)) for x in range(60)]
    return [float(weight / (2 * sum(weights) - 1)) for weight in weights]


def laplace_chances(scale: Fraction) -> list[float]:
    ratio = mpmath.exp(-mpmath.mpf(scale.denominator) / scale.numerator)
    return [float(ratio**x * (1 - ratio) / (1 + ratio)) for x in range(200)]


def fits(sample: torch.Tensor, chances: list[float]) -> bool:
    """Chi-square: integers expected at least 10 times, all others in one cell; chances[x] is for x and -x."""
    counts = Counter(sample.tolist())
    body = [x for x in range(-len(chances) + 1, len(chances)) if chances[abs(x)] * len(sample) >= 10]
    observed = [counts[x] for x in body]
    expected = [chances[abs(x)] * len(sample) for x in body]
    observed.append(len(sample) - sum(observed))
    expected.append(len(sample) - sum(expected))
    return bool(stats.chisquare(observed, expected).pvalue > 1e-4)


@pytest.mark.parametrize("variance", [Fraction(1, 2), Fraction(3), Fraction(25, 4)])
def test_the_discrete_gaussian_has_its_chances_and_not_those_of_a_stddev_a_tenth_off(variance: Fraction) -> None:
    sample = discrete_gaussian(8000, variance=variance, source=seeded_source(40063))
    assert sample.dtype == torch.int64
    assert fits(sample, gaussian_chances(variance))
    assert not fits(sample, gaussian_chances(variance * Fraction(81, 100)))
    assert not fits(sample, gaussian_chances(variance * Fraction(121, 100)))


@pytest.mark.parametrize("scale", [Fraction(1, 2), Fraction(7, 3), Fraction(5)])
def test_the_discrete_laplace_has_its_chances_and_not_those_of_another_scale(scale: Fraction) -> None:
    sample = discrete_laplace(8000, scale=scale, source=seeded_source(92987))
    assert fits(sample, laplace_chances(scale))
    assert not fits(sample, laplace_chances(scale * Fraction(4, 5)))
    assert not fits(sample, laplace_chances(scale * Fraction(6, 5)))


def test_the_rounded_gaussian_of_the_grid_is_close_to_the_exact_discrete_one() -> None:
    """Rounding adds 1/12 to the variance: at stddev 5 the laws differ by 0.3 % in variance, at 0.5 by a third."""
    near = rounded_normal(8000, 5.0, seeded_source(15073))
    assert fits(near, gaussian_chances(Fraction(25)))
    coarse = rounded_normal(8000, 0.5, seeded_source(15073))
    assert not fits(coarse, gaussian_chances(Fraction(1, 4)))


def test_a_law_without_spread_is_refused() -> None:
    with pytest.raises(ValueError, match="variance must be > 0"):
        discrete_gaussian(3, variance=Fraction(0), source=seeded_source(1193))
    with pytest.raises(ValueError, match="scale must be > 0"):
        discrete_laplace(3, scale=Fraction(-1), source=seeded_source(1193))


def test_nothing_drawn_is_an_empty_tensor() -> None:
    assert discrete_gaussian(0, variance=Fraction(1), source=seeded_source(1193)).shape == (0,)
