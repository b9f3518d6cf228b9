"""Random streams are the laws they say they are, never repeat, and can be replayed from a seed.

Each statistical test draws from a seed fixed beforehand, so that it never flakes. Its false-alarm
rate over the choice of the seed is ALARM unless it says otherwise.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from scipy import stats

from discreet.privacy.grid import first_normal
from discreet.privacy.randomness import (
    CHUNK,
    CPU,
    PAIRS,
    RandomSource,
    fast_pairs,
    laplace_values,
    radii,
    scratch,
    secure_source,
    seeded_source,
    write_pairs,
)
from discreet.privacy.rounded_sums import rounded_laplace

ALARM = 1e-4
PIECE = 2 * PAIRS  # words that make normal values at a time


def follows(sample: torch.Tensor, law: stats.rv_continuous, *, farthest: float) -> bool:
    """Chi-square over 200 cells, open tails beyond +-farthest among them: it sees the tails, as KS
    does not."""
    edges = np.concatenate(([-np.inf], np.linspace(-farthest, farthest, 199), [np.inf]))
    # the law is symmetric, and a cdf is most accurate on the left
    left = np.diff(law.cdf(edges[:101]))
    counts = np.histogram(sample.double().numpy(), edges)[0]
    return bool(
        stats.chisquare(counts, np.concatenate((left, left[::-1])) * len(sample)).pvalue > ALARM
    )


@pytest.fixture(params=["processor", "accelerator"])
def stream(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The stream that sources draw from: of the second one the words are moved into the first."""

    def fill(source: RandomSource, words: np.ndarray) -> None:
        words[:] = source.words_on(CPU, len(words)).numpy().view(words.dtype)

    if request.param == "accelerator":
        monkeypatch.setattr(RandomSource, "fill", fill)
    return str(request.param)


of_both = pytest.mark.usefixtures("stream")


def test_a_stream_depends_on_its_seed_alone_and_a_child_on_no_earlier_draw() -> None:
    cuts = [1, 7, 0, CHUNK, CHUNK + 4001, 3]
    fresh, used = seeded_source(90371), seeded_source(90371)
    parts = np.concatenate([used.words(cut) for cut in cuts])
    assert (parts == fresh.words(sum(cuts))).all()
    used.child("round", 2).words(17)
    assert (
        seeded_source(90371).child("round", 3).words(100) == used.child("round", 3).words(100)
    ).all()


@of_both
def test_children_with_different_labels_are_different_streams() -> None:
    source = seeded_source(90371)
    labels = [
        ("ab", "c"),
        ("a", "bc"),
        ("abc",),
        ("as", "b"),
        ("a", "sb"),
        ("1",),
        (1,),
        (-1,),
        ("",),
        ("", ""),
    ]
    children = [source, source.child("a").child("bc"), seeded_source(90372).child(1)]
    children += [source.child(*each) for each in labels]
    assert len(set(np.concatenate([child.words(50) for child in children]).tolist())) == 50 * len(
        children
    )


@of_both
def test_secure_sources_and_their_children_never_repeat() -> None:
    parent = secure_source()
    sources = [parent, secure_source(), parent.child("round", 1), parent.child("round", 1)]
    words = np.concatenate([source.words(5000) for source in sources] + [parent.words(5000)])
    assert len(np.unique(words)) == len(words)
    assert all(source.is_secure for source in sources)
    assert not seeded_source(71923).child("a").is_secure


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("make", [secure_source, lambda: seeded_source(71923)])
def test_a_source_cannot_be_duplicated(duplicate, make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(TypeError, match="repeat its noise"):
        duplicate(make())


@of_both
def test_a_source_is_refused_in_a_forked_process(monkeypatch: pytest.MonkeyPatch) -> None:
    source = secure_source()
    monkeypatch.setattr("os.getpid", lambda: -1)
    with pytest.raises(RuntimeError, match="another process"):
        source.normal(3)


@of_both
def test_each_bit_of_a_word_is_fair_and_unrelated_to_the_next_word() -> None:
    """128 statistics, each normal: false alarm 128 * 4e-8 = 5e-6. A bit that is 1 in 51 of 100
    words is found."""
    words = seeded_source(38119).words(200_001)
    assert largest_of_bits(words) < 5.5 / math.sqrt(200_000)
    words[::50] |= np.uint64(1 << 63)
    assert largest_of_bits(words) > 5.5 / math.sqrt(200_000)
    repeated = seeded_source(38119).words(200_001)
    repeated[1::50] = repeated[::50][: len(repeated[1::50])]
    assert largest_of_bits(repeated) > 5.5 / math.sqrt(200_000)


def largest_of_bits(words: np.ndarray) -> float:
    """The farthest that the mean of a bit, or of its product with the one before, is from that of a
    fair coin."""
    centred = (
        2 * ((words[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)).astype(np.float64)
        - 1
    )
    return float(
        max(np.abs(centred[:-1].mean(0)).max(), np.abs((centred[1:] * centred[:-1]).mean(0)).max())
    )


@of_both
@pytest.mark.parametrize(("draws", "seed"), [(1, 24109), (2, 83207), (4, 51613)])
def test_normal_follows_the_normal_law_in_its_body_and_tails(draws: int, seed: int) -> None:
    sample = seeded_source(seed).normal(2_000_000, draws=draws, dtype=torch.float64)
    assert stats.kstest(sample[:300_000].numpy(), "norm").pvalue > ALARM
    assert follows(sample, stats.norm, farthest=4.2)
    assert not follows(sample * 1.01, stats.norm, farthest=4.2)


@of_both
def test_float32_values_follow_the_normal_law_in_body_tails_and_centre() -> None:
    sample = seeded_source(60917).normal(2_000_000)
    assert stats.kstest(sample[:300_000].numpy(), "norm").pvalue > ALARM
    assert follows(sample, stats.norm, farthest=4.2)
    assert not follows(sample * 1.01, stats.norm, farthest=4.2)
    assert follows(sample[sample.abs() < 1e-3] * 1e3, stats.uniform(-1, 2), farthest=0.99)


@of_both
def test_pairs_of_float32_values_are_independent() -> None:
    """Radius and angle of a pair: an exponential law and a uniform one, and their products are not
    correlated."""
    cosine, sine = seeded_source(20929).normal(2 * PAIRS).double().reshape(2, -1)
    assert (
        stats.kstest((cosine.square() + sine.square()).numpy(), "expon", args=(0, 2)).pvalue > ALARM
    )
    assert (
        stats.kstest(
            torch.atan2(sine, cosine).numpy(), "uniform", args=(-math.pi, 2 * math.pi)
        ).pvalue
        > ALARM
    )
    assert abs(float((cosine * sine).mean())) < 5 / math.sqrt(PAIRS)


def fast(words: torch.Tensor) -> torch.Tensor:
    """The values of m words for radii and m words for angles, of which the first half is used."""
    count = len(words) // 2
    out = torch.empty(2 * count)
    fast_pairs(
        words[: count + (count + 1) // 2].clone(), out, 1.0, torch.empty(count), torch.empty(count)
    )
    return out.double()


def fast_on_cpu(words: torch.Tensor) -> torch.Tensor:
    """The same values by NumPy."""
    count = len(words) // 2
    scratch.reserve(count)
    drawn, out = words.clone().numpy(), np.empty(2 * count, np.float32)
    write_pairs(radii(drawn[:count], 1.0), drawn[count:], out)
    return torch.from_numpy(out).double()


@pytest.mark.parametrize("pairs_of", [lambda words: first_normal(words)[0], fast, fast_on_cpu])
def test_the_tail_is_right_beyond_eight_sigma(
    pairs_of: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Given R > 8, R^2 - 64 is exponential with mean 2, to the relative 1e-5 by which 63 bits cut
    that tail."""
    largest = int(math.exp(-32) * 2**63)
    radius_words = torch.from_numpy(np.random.default_rng(39119).integers(0, largest, 50_000))
    angle_words = torch.from_numpy(seeded_source(4421).words(50_000).view(np.int64))
    pairs = pairs_of(torch.cat((radius_words, angle_words))).reshape(2, -1)
    beyond = pairs.square().sum(0) - 64
    assert stats.kstest(beyond.numpy(), "expon", args=(0, 2)).pvalue > ALARM
    assert stats.kstest((beyond / 1.05).numpy(), "expon", args=(0, 2)).pvalue < ALARM


@of_both
def test_laplace_follows_its_law_and_not_another_scale() -> None:
    zeros = torch.zeros(1_000_000, dtype=torch.float64)
    sample = rounded_laplace(zeros, 1.0, seeded_source(18397))
    assert stats.kstest(sample[:300_000].numpy(), "laplace").pvalue > ALARM
    assert follows(sample, stats.laplace, farthest=10)
    assert not follows(sample * 1.01, stats.laplace, farthest=10)


def source_of(words: Iterable[int], monkeypatch: pytest.MonkeyPatch) -> RandomSource:
    """A source whose stream is these words."""
    source, stream = seeded_source(29611), iter(words)
    monkeypatch.setattr(
        source,
        "words",
        lambda count: np.array([next(stream) for _ in range(count)], dtype=np.uint64),
    )
    return source


def test_laplace_tails_do_not_end_where_the_first_word_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The law has no memory: beyond the least that 63 bits can say, 43.7, the rest is exponential
    again."""
    count = 3000
    words = [0] * count + seeded_source(71453).words(4).tolist()
    source = source_of(words, monkeypatch)
    zeros = torch.zeros(count, dtype=torch.float64)
    sample = rounded_laplace(zeros, 1.0, source).numpy()
    cut = np.abs(laplace_values(torch.zeros(count, dtype=torch.int64)).numpy())
    for drawn, follows_the_law in ((sample, True), (cut, False)):
        assert (
            bool(stats.kstest(drawn - 63 * math.log(2), "expon").pvalue > ALARM) is follows_the_law
        )


@pytest.mark.parametrize(("count", "threads"), [(0, 1), (7, 1), (PIECE + 1, 1), (3 * PIECE + 2, 2)])
def test_normal_values_are_those_of_each_piece_of_words(count: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        drawn = seeded_source(50923).normal(count, dtype=torch.float64)
    finally:
        torch.set_num_threads(before)
    source, expected = seeded_source(50923), [torch.zeros(0, dtype=torch.float64)]
    for start in range(0, count, PIECE):
        size = min(PIECE, count - start)
        words = torch.from_numpy(source.words(size + size % 2).view(np.int64))
        expected.append(first_normal(words)[0][:size])
    torch.testing.assert_close(drawn, torch.cat(expected), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("count", [0, 7, PIECE + 1])
def test_values_of_float32_are_those_of_each_piece_of_words_and_leave_none_over(count: int) -> None:
    """The other value of the last one's pair would tell its radius to those who get the memory."""
    drawn = seeded_source(50923).normal(count)
    source, expected = seeded_source(50923), [torch.zeros(0)]
    for start in range(0, count, PIECE):
        size = min(PIECE, count - start)
        pairs = (size + 1) // 2
        words = torch.from_numpy(source.words(pairs + (pairs + 1) // 2).view(np.int64))
        out = torch.empty(2 * pairs)
        fast_pairs(words, out, 1.0, *torch.empty(2, pairs))
        expected.append(out[:size])
    torch.testing.assert_close(drawn, torch.cat(expected), rtol=1e-5, atol=1e-6)
    assert drawn.untyped_storage().nbytes() == 4 * count
