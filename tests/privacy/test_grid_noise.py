"""Each value is the correct rounding of what its random bits say, by mpmath, and the law is right.

Statistical tests draw from a seed fixed beforehand; their false-alarm rate over its choice is
stated.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from itertools import repeat

import mpmath
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from discreet.accounting.correlation import factor_and_weights
from discreet.privacy import correlated_gaussian, grid
from discreet.privacy import discrete_gaussian as module
from discreet.privacy.correlated_gaussian import KEY_WORDS, CorrelatedGaussian, combined_noise
from discreet.privacy.discrete_gaussian import LARGEST_VARIANCE, discrete_gaussian
from discreet.privacy.grid import (
    ERROR,
    Grid,
    first_normal,
    grid_slack,
    laplace_grid_slack,
    second_normal,
)
from discreet.privacy.randomness import (
    CHUNK,
    LOW_63_BITS,
    RandomSource,
    laplace_values,
    seeded_source,
    signed,
)

Draw = Callable[[int, float, RandomSource], torch.Tensor]
LOW = 2**63 - 1
rounded_normal, rounded_laplace = Grid(1.0).gaussian, Grid(1.0).laplace


def radius_of(word: int | mpmath.mpf) -> mpmath.mpf:
    return mpmath.sqrt(-2 * mpmath.log(mpmath.mpf(word) / mpmath.mpf(2) ** 63))


def middle(word: int) -> mpmath.mpf:
    return mpmath.mpf(word) + 0.5


def corner_words(seed: int, count: int) -> torch.Tensor:
    """Random radius and angle words, the first radii at the ends of where one look may do, the
    angles at the axes."""
    words = signed(seeded_source(seed).words(2 * count))
    words[:4] = torch.tensor([2**43, 2**43 + 7, 2**63 - 2**43 - 1, 2**63 - 2**43 - 99])
    words[count : count + 6] = torch.tensor([0, 1, -1, -(2**63), 2**62, 2**63 - 1])
    words[count + 6 : count + 8] = torch.tensor([-(2**62), 2**61])
    return words


def test_a_first_look_is_off_by_less_than_its_bound() -> None:
    """Against both ends of what the 63 and 64 bits leave open, for 2000 random words and the worst
    ones."""
    words = corner_words(83639, 2000)
    values, sizes = (
        first_normal(words)[0].reshape(2, -1).T.tolist(),
        laplace_values(words[:2000]).tolist(),
    )
    worst = of_laplace = 0.0
    with mpmath.workdps(40):
        pairs = zip(values, sizes, *words.reshape(2, -1).tolist(), strict=True)
        for (cosine, sine), size, radius_word, angle_word in pairs:
            for low in (radius_word & LOW, (radius_word & LOW) + 1):
                of_laplace = max(of_laplace, abs(float(abs(size) - radius_of(low) ** 2 / 2)))
                for turn in (angle_word, angle_word + 1):
                    angle = mpmath.pi * turn / mpmath.mpf(2) ** 63
                    gaps = (
                        cosine - radius_of(low) * mpmath.cos(angle),
                        sine - radius_of(low) * mpmath.sin(angle),
                    )
                    worst = max(worst, *(abs(float(gap)) for gap in gaps))
    assert ERROR / 16 < worst < ERROR / 1.5
    assert ERROR / 16 < of_laplace < ERROR / 1.5


@pytest.mark.parametrize("draw", [rounded_normal, rounded_laplace])
@pytest.mark.parametrize("scale", [0.4, 2.0**20])
def test_first_and_second_look_agree(
    draw: Draw, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = draw(301, scale, seeded_source(60169))
    monkeypatch.setattr(grid, "ERROR", 1 / scale)
    assert torch.equal(draw(301, scale, seeded_source(60169)), first)


def test_radius_words_near_an_end_are_never_decided_by_one_look() -> None:
    radii = torch.tensor([0, 2**43 - 1, 2**43, 2**62, 2**63 - 2**43 + 1, 2**63 - 1])
    unsure = [True, True, False, False, True, True]
    assert grid.first_normal(radii.repeat(2))[1].tolist() == unsure + unsure
    signed_words = torch.cat((radii, radii - 2**63))
    assert grid.first_laplace(signed_words)[1].tolist() == ([True] * 2 + [False] * 4) * 2


def further_bits(index: int) -> tuple[int, int]:
    """The bits that SHAKE-256 adds to the two uniforms at an index, for words that are all zero."""
    more = hashlib.shake_256(bytes(32 + 8) + index.to_bytes(8, "big")).digest(16)
    return int.from_bytes(more[:8], "big"), int.from_bytes(more[8:], "big")


def test_values_in_the_farthest_tail_come_from_the_further_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A radius word of 0 says only R > 9.3. With an angle word of 0 the value is scale * R, R by
    all 127 bits."""
    source = seeded_source(46301)
    monkeypatch.setattr(source, "words", lambda count: np.zeros(count, dtype=np.uint64))
    normal, laplace = (
        rounded_normal(20, 1000.0, source)[:10].tolist(),
        rounded_laplace(10, 1000.0, source).tolist(),
    )
    with mpmath.workdps(60):
        for index in range(10):
            exponential = -mpmath.log(middle(further_bits(index)[0]) / mpmath.mpf(2) ** 127)
            assert normal[index] == int(mpmath.floor(1000 * mpmath.sqrt(2 * exponential) + 0.5))
            assert laplace[index] == int(mpmath.floor(1000 * exponential + 0.5))
    assert len(set(normal)) == 10


def test_a_second_look_uses_every_bit_in_every_quarter_turn() -> None:
    words = signed(seeded_source(15241).words(64))
    radii, turns = words.reshape(2, -1).tolist()
    with mpmath.workdps(80), localcontext(prec=140):
        for pair, (radius_word, turn_word) in enumerate(zip(radii, turns, strict=True)):
            for_radius, for_turn = further_bits(pair)
            uniform = middle(((radius_word & LOW) << 64) + for_radius) / mpmath.mpf(2) ** 127
            angle = mpmath.pi * middle((turn_word << 64) + for_turn) / mpmath.mpf(2) ** 127
            for index, function in ((pair, mpmath.cos), (pair + 32, mpmath.sin)):
                seen = mpmath.mpf(str(grid.second_normal(words, index, bytes(40))))
                assert abs(seen - mpmath.sqrt(-2 * mpmath.log(uniform)) * function(angle)) < 1e-70


@pytest.mark.parametrize(
    ("draw", "law"), [(rounded_normal, stats.norm), (rounded_laplace, stats.laplace)]
)
@pytest.mark.parametrize("scale", [0.3, 2.0, 9.5])
def test_rounded_noise_has_the_chances_of_the_rounded_law(
    draw: Draw, law: stats.rv_continuous, scale: float
) -> None:
    """Chi-square over integers expected at least 10 times: false alarm 1e-4. A scale 3 % off is
    rejected."""
    sample = draw(200_000, scale, seeded_source(35317))

    def fits(other_scale: float) -> bool:
        chances = [
            law.cdf((k + 0.5) / other_scale) - law.cdf((k - 0.5) / other_scale) for k in range(200)
        ]
        body = max(k for k, chance in enumerate(chances) if chance * len(sample) >= 10)
        observed = torch.bincount(sample.abs(), minlength=body + 1)[: body + 1].tolist()
        expected = [chances[0], *(2 * chance for chance in chances[1 : body + 1])]
        observed.append(len(sample) - sum(observed))
        expected.append(1 - sum(expected))
        return bool(
            stats.chisquare(observed, [len(sample) * chance for chance in expected]).pvalue > 1e-4
        )

    assert fits(scale)
    assert not fits(1.03 * scale)
    assert not fits(0.97 * scale)


@pytest.mark.parametrize("bits", [7, 9, 11])
@pytest.mark.parametrize("stddev", [0.3, 2.0, 7.5])
def test_the_slack_bounds_the_distance_counted_with_few_bits(bits: int, stddev: float) -> None:
    """All midpoints, rounded and counted, against the chances of the rounded Gaussian and of
    Laplace noise."""
    middles, edges = (np.arange(2**bits) + 0.5) / 2**bits, np.arange(-400, 402) - 0.5
    radii, sizes = np.sqrt(-2 * np.log(middles))[:, None], -np.log(middles)
    gaussian, laplace = (np.diff(law.cdf(edges / stddev)) for law in (stats.norm, stats.laplace))
    for values, exact, slack in (
        (radii * np.cos(2 * np.pi * middles), gaussian, grid_slack),
        (radii * np.sin(2 * np.pi * middles), gaussian, grid_slack),
        (np.concatenate((sizes, -sizes)), laplace, laplace_grid_slack),
    ):
        rounded = np.floor(stddev * values + 0.5).astype(int)
        drawn = np.bincount(rounded.ravel() + 400, minlength=801) / rounded.size
        assert 0 < np.abs(drawn - exact).sum() / 2 <= slack(1, stddev, bits=bits)


DRAWS = 400_000
RATE = 1e-9


def probabilities(variance: int, reach: int) -> NDArray[np.float64]:
    """Of -reach .. reach, by the definition."""
    weights = np.exp(-(np.arange(-reach, reach + 1.0) ** 2) / (2 * variance))
    return weights / weights.sum()


def chance_of_such_counts(drawn: torch.Tensor, variance: int) -> float:
    """The p-value of a chi-square test against N_Z(0, variance), integers put together until each
    bin expects 50."""
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
    """False alarm 1e-9 each. Variances 3 % off are told from it, and a Gaussian that was rounded
    where it differs."""
    drawn = discrete_gaussian(DRAWS, variance, seeded_source(64793))
    assert chance_of_such_counts(drawn, variance) > RATE
    for off in (97, 103):
        assert variance < 100 or chance_of_such_counts(drawn, variance * off // 100) < RATE
    rounded = Grid(1.0).gaussian(DRAWS, math.sqrt(variance), seeded_source(64793))
    assert variance > 3 or chance_of_such_counts(rounded, variance) < RATE


@pytest.mark.parametrize("variance", [2**20, 2**40 + 1, LARGEST_VARIANCE])
def test_large_variances_are_gaussian_in_law_and_right_in_variance(variance: int) -> None:
    """KS and chi-square, false alarm 1e-9 each; 3 % off the variance is rejected. Steps are 1/1000
    of it or less."""
    drawn = discrete_gaussian(DRAWS, variance, seeded_source(64793)).double() / math.sqrt(variance)
    energy, (low, high) = float((drawn**2).sum()), stats.chi2.ppf([RATE / 2, 1 - RATE / 2], DRAWS)
    assert low < energy < high
    assert not low < energy * 1.03 < high
    assert stats.kstest(drawn.numpy()[:100_000], "norm").pvalue > RATE


@pytest.mark.parametrize("variance", [1, 50, 2**64])
def test_what_decides_whether_a_draw_is_kept_is_off_by_less_than_its_bound(variance: int) -> None:
    """In float64, for sizes up to 45 scales; the other side, -ln v, has its own test in
    test_grid_noise."""
    scale = math.isqrt(variance) + 1
    sizes = torch.linspace(0, 45, 500, dtype=torch.float64).mul_(scale).floor().long()
    floats = sizes.double().sub_(variance / scale).square_().div_(2.0 * variance).tolist()
    with mpmath.workdps(60):
        exact = [
            (mpmath.mpf(size) - mpmath.mpf(variance) / scale) ** 2 / (2 * variance)
            for size in sizes.tolist()
        ]
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
            assert size == int(
                mpmath.floor(-scale * mpmath.log((mpmath.mpf(bits) + 0.5) / mpmath.mpf(2) ** 127))
            )


def test_a_uniform_that_begins_with_any_number_of_zeros_still_has_its_logarithm() -> None:
    """The tails have no end: 63 + 3 * 64 zero bits, then ones, are -ln u = 255 ln 2 and a
    little."""
    more = iter([0, 0, 0, *repeat(2**64 - 1, 40)])
    found = module._settled(0, more, lambda low, high: module._floor(1000, low, high))
    assert found == int(1000 * 255 * math.log(2))


def test_a_uniform_on_the_edge_of_a_decision_gets_bits_until_it_is_past_it() -> None:
    """The binary digits of exp(-1) are followed for 63 + 2 * 64 of them: only what comes then
    decides."""
    with mpmath.workdps(200):
        digits = int(mpmath.floor(mpmath.exp(-1) * mpmath.mpf(2) ** 255))
    blocks = [digits >> 192, *(digits >> shift & (2**64 - 1) for shift in (128, 64, 0))]
    for last, size in ((0, 1), (2**64 - 1, 0)):
        more = iter([blocks[1], blocks[2], last, *repeat(last, 9)])
        assert (
            module._settled(blocks[0], more, lambda low, high: module._floor(1, low, high)) == size
        )


KEYS = [bytes([number]) * 32 for number in range(1, 13)]


def stored(key: bytes, count: int) -> list[Decimal]:
    """The exact Gaussians of a key: what would be stored, if noise were."""
    source, values = RandomSource(key, is_secure=True), []
    more = source.words(KEY_WORDS).tobytes()
    for start in range(0, count, CHUNK):
        length = min(CHUNK, count - start)
        words = signed(source.words(length + length % 2))
        with localcontext(prec=140):
            values += [
                second_normal(words, at, more + start.to_bytes(8, "big")) for at in range(length)
            ]
    return values


def of_stored(scale: float, weights: list[float], held: list[list[Decimal]]) -> list[int]:
    with localcontext(prec=140):
        terms = [Decimal(weight) * Decimal(scale) for weight in weights]
        sums = (
            sum(term * value for term, value in zip(terms, at, strict=True))
            for at in zip(*held, strict=True)
        )
        return [math.floor(each + Decimal("0.5")) for each in sums]


@pytest.mark.parametrize("kind", ["bsr", "bisr", "sqrt", "none"])
@pytest.mark.parametrize(
    "doubt", [correlated_gaussian.ERROR, 1.0]
)  # 1: each value is looked at again, in decimals
def test_noise_drawn_again_is_bit_by_bit_that_of_noise_that_was_stored(
    kind: str, doubt: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(correlated_gaussian, "ERROR", doubt)
    held, scale, count = [stored(key, 15) for key in KEYS[:6]], 1234.5678, 15
    for rounds in range(1, 7):
        weights = factor_and_weights(kind, 3, rounds)[1].tolist()
        parts = list(zip(weights, reversed(KEYS[:rounds]), strict=True))
        assert combined_noise(count, scale, parts).tolist() == of_stored(
            scale, weights, held[:rounds][::-1]
        )


def test_noise_has_the_covariance_of_the_matrix_and_not_of_a_tenth_more() -> None:
    count, scale = 200_000, 1000.0  # the keys are fixed: the same verdict each time
    weights = factor_and_weights("bsr", 3, 4)[1].tolist()
    rows = [
        combined_noise(count, scale, list(zip(weights, reversed(KEYS[:t]), strict=False)))
        for t in range(1, 5)
    ]
    found = torch.cov(torch.stack(rows).double() / scale)
    matrix = torch.tensor(
        [[weights[t - s] if t >= s else 0.0 for s in range(4)] for t in range(4)],
        dtype=torch.float64,
    )
    assert torch.allclose(found, matrix @ matrix.T, atol=0.02)
    assert not torch.allclose(found, 1.1**2 * matrix @ matrix.T, atol=0.02)


def test_noise_is_for_the_sensitivity_and_is_added_to_the_total() -> None:
    grid, total = Grid(2.0**-10), torch.arange(50)
    noise = (
        CorrelatedGaussian(2.0).add_grid_noise(total, 0.5, grid=grid, parts=[(1.0, KEYS[0])])
        - total
    )
    assert noise.equal(combined_noise(50, math.nextafter(1.0, 2.0) * 2.0**10, [(1.0, KEYS[0])]))
    assert (
        CorrelatedGaussian(0.0)
        .add_grid_noise(total, 0.5, grid=grid, parts=[(1.0, KEYS[0])])
        .equal(total)
    )
