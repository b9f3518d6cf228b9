"""Noise that is drawn again from keys: to the last bit as if it had been stored, and of the right law."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import pytest
import torch

from discreet.accounting.correlation import factor_and_weights
from discreet.privacy import correlated_gaussian
from discreet.privacy.correlated_gaussian import KEY_WORDS, CorrelatedGaussian, combined
from discreet.privacy.grid import Grid, second_normal
from discreet.privacy.randomness import CHUNK, RandomSource, signed

KEYS = [bytes([number]) * 32 for number in range(1, 13)]


def stored(key: bytes, count: int) -> list[Decimal]:
    """The exact Gaussians of a key: what would be stored, if noise were."""
    source, values = RandomSource(key, is_secure=True), []
    more = source.words(KEY_WORDS).tobytes()
    for start in range(0, count, CHUNK):
        length = min(CHUNK, count - start)
        words = signed(source.words(length + length % 2))
        with localcontext(prec=140):
            values += [second_normal(words, at, more + start.to_bytes(8, "big")) for at in range(length)]
    return values


def of_stored(scale: float, weights: list[float], held: list[list[Decimal]]) -> list[int]:
    with localcontext(prec=140):
        terms = [Decimal(weight) * Decimal(scale) for weight in weights]
        sums = (sum(term * value for term, value in zip(terms, at, strict=True)) for at in zip(*held, strict=True))
        return [math.floor(each + Decimal("0.5")) for each in sums]


@pytest.mark.parametrize("kind", ["bsr", "bisr", "sqrt", "none"])
@pytest.mark.parametrize("doubt", [correlated_gaussian.ERROR, 1.0])  # 1: each value is looked at again, in decimals
def test_noise_drawn_again_is_bit_by_bit_that_of_noise_that_was_stored(
    kind: str, doubt: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(correlated_gaussian, "ERROR", doubt)
    held, scale, count = [stored(key, 15) for key in KEYS[:6]], 1234.5678, 15
    for rounds in range(1, 7):
        weights = factor_and_weights(kind, 3, rounds)[1].tolist()
        parts = list(zip(weights, reversed(KEYS[:rounds]), strict=True))
        assert combined(count, scale, parts).tolist() == of_stored(scale, weights, held[:rounds][::-1])


def test_noise_has_the_covariance_of_the_matrix_and_not_of_a_tenth_more() -> None:
    count, scale = 200_000, 1000.0  # the keys are fixed: the same verdict each time
    weights = factor_and_weights("bsr", 3, 4)[1].tolist()
    rows = [combined(count, scale, list(zip(weights, reversed(KEYS[:t]), strict=False))) for t in range(1, 5)]
    found = torch.cov(torch.stack(rows).double() / scale)
    matrix = torch.tensor(
        [[weights[t - s] if t >= s else 0.0 for s in range(4)] for t in range(4)], dtype=torch.float64
    )
    assert torch.allclose(found, matrix @ matrix.T, atol=0.02)
    assert not torch.allclose(found, 1.1**2 * matrix @ matrix.T, atol=0.02)


def test_noise_is_for_the_sensitivity_and_is_added_to_the_total() -> None:
    grid, total = Grid(2.0**-10), torch.arange(50)
    noise = CorrelatedGaussian(2.0).add_grid_noise(total, 0.5, grid=grid, parts=[(1.0, KEYS[0])]) - total
    assert noise.equal(combined(50, math.nextafter(1.0, 2.0) * 2.0**10, [(1.0, KEYS[0])]))
    assert CorrelatedGaussian(0.0).add_grid_noise(total, 0.5, grid=grid, parts=[(1.0, KEYS[0])]).equal(total)
