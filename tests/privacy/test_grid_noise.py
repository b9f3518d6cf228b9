"""Each value is the correct rounding of what its random bits say, by mpmath, and the law is right.

Statistical tests draw from a seed fixed beforehand; their false-alarm rate over its choice is stated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from decimal import localcontext

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

from discreet.privacy import grid
from discreet.privacy.grid import ERROR, Grid
from discreet.privacy.randomness import RandomSource, box_muller, laplace_values, seeded_source, signed

Draw = Callable[[int, float, RandomSource], torch.Tensor]
LOW = 2**63 - 1
rounded_normal, rounded_laplace = Grid(1.0).gaussian, Grid(1.0).laplace


def radius_of(word: int | mpmath.mpf) -> mpmath.mpf:
    return mpmath.sqrt(-2 * mpmath.log(mpmath.mpf(word) / mpmath.mpf(2) ** 63))


def middle(word: int) -> mpmath.mpf:
    return mpmath.mpf(word) + 0.5


def corner_words(seed: int, count: int) -> torch.Tensor:
    """Random radius and angle words, the first radii at the ends of where one look may do, the angles at the axes."""
    words = signed(seeded_source(seed).words(2 * count))
    words[:4] = torch.tensor([2**43, 2**43 + 7, 2**63 - 2**43 - 1, 2**63 - 2**43 - 99])
    words[count : count + 6] = torch.tensor([0, 1, -1, -(2**63), 2**62, 2**63 - 1])
    words[count + 6 : count + 8] = torch.tensor([-(2**62), 2**61])
    return words


def test_a_first_look_is_off_by_less_than_its_bound() -> None:
    """Against both ends of what the 63 and 64 bits leave open, for 2000 random words and the worst ones."""
    words = corner_words(83639, 2000)
    values, sizes = box_muller(words).reshape(2, -1).T.tolist(), laplace_values(words[:2000]).tolist()
    worst = of_laplace = 0.0
    with mpmath.workdps(40):
        pairs = zip(values, sizes, *words.reshape(2, -1).tolist(), strict=True)
        for (cosine, sine), size, radius_word, angle_word in pairs:
            for low in (radius_word & LOW, (radius_word & LOW) + 1):
                of_laplace = max(of_laplace, abs(float(abs(size) - radius_of(low) ** 2 / 2)))
                for turn in (angle_word, angle_word + 1):
                    angle = mpmath.pi * turn / mpmath.mpf(2) ** 63
                    gaps = (cosine - radius_of(low) * mpmath.cos(angle), sine - radius_of(low) * mpmath.sin(angle))
                    worst = max(worst, *(abs(float(gap)) for gap in gaps))
    assert ERROR / 16 < worst < ERROR / 1.5
    assert ERROR / 16 < of_laplace < ERROR / 1.5


@pytest.mark.parametrize("draw", [rounded_normal, rounded_laplace])
@pytest.mark.parametrize("scale", [0.4, 2.0**20])
def test_first_and_second_look_agree(draw: Draw, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    first = draw(301, scale, seeded_source(60169))
    monkeypatch.setattr(grid, "ERROR", 1 / scale)
    assert torch.equal(draw(301, scale, seeded_source(60169)), first)


def test_radius_words_near_an_end_are_never_decided_by_one_look() -> None:
    radii = torch.tensor([0, 2**43 - 1, 2**43, 2**62, 2**63 - 2**43 + 1, 2**63 - 1])
    unsure = [True, True, False, False, True, True]
    assert grid.first_normal(radii.repeat(2))[1].tolist() == unsure + unsure
    signed_words = torch.cat((radii, radii - 2**63))
    assert grid._first_laplace(signed_words)[1].tolist() == ([True] * 2 + [False] * 4) * 2


def further_bits(index: int) -> tuple[int, int]:
    """The bits that SHAKE-256 adds to the two uniforms at an index, for words that are all zero."""
    more = hashlib.shake_256(bytes(32 + 8) + index.to_bytes(8, "big")).digest(16)
    return int.from_bytes(more[:8], "big"), int.from_bytes(more[8:], "big")


def test_values_in_the_farthest_tail_come_from_the_further_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A radius word of 0 says only R > 9.3. With an angle word of 0 the value is scale * R, R by all 127 bits."""
    source = seeded_source(46301)
    monkeypatch.setattr(source, "words", lambda count: np.zeros(count, dtype=np.uint64))
    normal, laplace = rounded_normal(20, 1000.0, source)[:10].tolist(), rounded_laplace(10, 1000.0, source).tolist()
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


@pytest.mark.parametrize(("draw", "law"), [(rounded_normal, stats.norm), (rounded_laplace, stats.laplace)])
@pytest.mark.parametrize("scale", [0.3, 2.0, 9.5])
def test_rounded_noise_has_the_chances_of_the_rounded_law(draw: Draw, law: stats.rv_continuous, scale: float) -> None:
    """Chi-square over integers expected at least 10 times: false alarm 1e-4. A scale 3 % off is rejected."""
    sample = draw(200_000, scale, seeded_source(35317))

    def fits(other_scale: float) -> bool:
        chances = [law.cdf((k + 0.5) / other_scale) - law.cdf((k - 0.5) / other_scale) for k in range(200)]
        body = max(k for k, chance in enumerate(chances) if chance * len(sample) >= 10)
        observed = torch.bincount(sample.abs(), minlength=body + 1)[: body + 1].tolist()
        expected = [chances[0], *(2 * chance for chance in chances[1 : body + 1])]
        observed.append(len(sample) - sum(observed))
        expected.append(1 - sum(expected))
        return bool(stats.chisquare(observed, [len(sample) * chance for chance in expected]).pvalue > 1e-4)

    assert fits(scale)
    assert not fits(1.03 * scale)
    assert not fits(0.97 * scale)
