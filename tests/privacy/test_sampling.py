"""Cohorts and batches are drawn with the chances that the accounting takes for granted.

Statistical tests draw from a seed fixed beforehand; the false-alarm rate over its choice is ALARM
for each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
from dp_accounting import DpEvent, GaussianDpEvent, NonPrivateDpEvent, PoissonSampledDpEvent
from scipy import stats

from discreet.accounting.accounting import Entries, epsilon_spent
from discreet.privacy.randomness import seeded_source
from discreet.privacy.sampling import fixed_size_sample, poisson_sample
from discreet.privacy.selection import SHAPES, TrialCount, selection_event

ALARM = 1e-4


def inclusions(count: int, probability: float, *, rounds: int, seed: int) -> np.ndarray:
    """The indices that were in, by round: (rounds, count) of 0 and 1."""
    source = seeded_source(seed)
    table = np.zeros((rounds, count))
    for row in table:
        row[poisson_sample(count, probability=probability, source=source).numpy()] = 1
    return table


def has_frequency(table: np.ndarray, probability: float) -> bool:
    """Of how often each index was in, by chi-square, and all together: false alarm 2 * ALARM."""
    rounds, count = table.shape
    spread = (table.sum(0) - rounds * probability) / math.sqrt(
        rounds * probability * (1 - probability)
    )
    each = stats.chi2.sf((spread**2).sum(), count) > ALARM
    together = stats.binomtest(int(table.sum()), rounds * count, probability).pvalue > ALARM
    return bool(each and together)


@pytest.mark.parametrize("probability", [0.01, 0.3, 0.95])
def test_each_index_is_in_with_the_probability_and_no_other(probability: float) -> None:
    table = inclusions(100, probability, rounds=8000, seed=31847)
    assert has_frequency(table, probability)
    assert not has_frequency(table, 0.9 * probability)
    assert not has_frequency(table, min(1.1 * probability, 0.97))


def test_indices_are_in_independently_of_each_other() -> None:
    """The size is binomial, which positive or negative dependence would spread or narrow; so is
    each pair's count."""
    table = inclusions(30, 0.2, rounds=8000, seed=77003)
    assert have_binomial_sizes(table, 0.2)
    assert are_unrelated(table)
    table[:800, 7] = table[:800, 3]  # one in ten times as the other
    assert not are_unrelated(table)
    assert not have_binomial_sizes(np.repeat(table[:, :15], 2, axis=1), 0.2)


def have_binomial_sizes(table: np.ndarray, probability: float) -> bool:
    rounds, count = table.shape
    sizes = np.bincount(table.sum(1).astype(int), minlength=count + 1)
    expected = rounds * stats.binom.pmf(np.arange(count + 1), count, probability)
    body = expected > 5
    observed = np.append(sizes[body], sizes[~body].sum())
    return bool(
        stats.chisquare(observed, np.append(expected[body], expected[~body].sum())).pvalue > ALARM
    )


def are_unrelated(table: np.ndarray) -> bool:
    rounds, count = table.shape
    correlations = np.corrcoef(table.T)[np.triu_indices(count, 1)]
    return bool(
        np.abs(correlations).max()
        < stats.norm.isf(ALARM / 2 / len(correlations)) / math.sqrt(rounds)
    )


def test_an_index_is_in_exactly_below_the_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    threshold = math.floor(0.3 * 2**64)
    source = seeded_source(11)
    words = np.array([threshold, threshold - 1, 0, 2**64 - 1], dtype=np.uint64)
    monkeypatch.setattr(source, "words", lambda count: words)
    assert poisson_sample(4, probability=0.3, source=source).tolist() == [1, 2]


def test_probabilities_zero_and_one_are_exact() -> None:
    source = seeded_source(2087)
    assert poisson_sample(1000, probability=0.0, source=source).tolist() == []
    assert poisson_sample(1000, probability=1.0, source=source).tolist() == list(range(1000))
    assert len(poisson_sample(1000, probability=math.nextafter(1, 0), source=source)) == 1000
    assert poisson_sample(1000, probability=5e-324, source=source).tolist() == []
    assert poisson_sample(0, probability=0.5, source=source).shape == (0,)
    assert sorted(fixed_size_sample(3, size=3, source=source).tolist()) == [0, 1, 2]


def test_every_cohort_of_a_size_is_equally_likely() -> None:
    source = seeded_source(66293)
    seen: dict[tuple[int, ...], int] = dict.fromkeys(combinations(range(6), 3), 0)
    for _ in range(5000):
        seen[tuple(sorted(fixed_size_sample(6, size=3, source=source).tolist()))] += 1
    assert len(seen) == 20
    assert stats.chisquare(list(seen.values())).pvalue > ALARM
    seen[0, 1, 2] += 150  # three in a hundred are the first three
    assert stats.chisquare(list(seen.values())).pvalue < ALARM


DRAWS = 4000
FALSE_ALARM = 1e-6  # of each chi-square test below; the seeds are fixed, so it is paid once


def training(
    noise: float = 1.0, *, probability: float = 0.01, rounds: int = 1000
) -> tuple[tuple[DpEvent, int], ...]:
    return ((PoissonSampledDpEvent(probability, GaussianDpEvent(noise)), rounds),)


def selection_epsilon(candidates: Sequence[Entries], *, trials: TrialCount, delta: float) -> float:
    return epsilon_spent(
        [(selection_event(candidates, trials=trials), 1)], delta=delta, accountant="rdp"
    )


@pytest.mark.parametrize(
    ("distribution", "expected"), [("poisson", 4.671), ("logarithmic", 3.851), ("geometric", 4.431)]
)
def test_the_best_of_ten_on_average_costs_what_is_published(
    distribution: str, expected: float
) -> None:
    found = selection_epsilon([training()], trials=TrialCount(distribution, 10), delta=1e-6)
    assert found == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("distribution", SHAPES)
def test_candidates_with_more_noise_change_nothing(distribution: str) -> None:
    trials = TrialCount(distribution, 5)
    dearest = selection_epsilon([training(1.0)], trials=trials, delta=1e-6)
    mixed = selection_epsilon(
        [training(3.0), training(1.0), training(2.0)], trials=trials, delta=1e-6
    )
    # Orders that RDP can't compute for one of the candidates are given up for all: the bound may
    # grow by a little.
    assert dearest <= mixed <= dearest * 1.01


def test_candidates_of_which_none_costs_most_are_refused() -> None:
    candidates = [training(1.0), training(4.0, probability=0.1)]
    with pytest.raises(ValueError, match="none costs most"):
        selection_epsilon(candidates, trials=TrialCount("poisson", 5), delta=1e-6)


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        ([()], 0.0),
        ([((NonPrivateDpEvent(), 1),)], math.inf),
        ([training(), ((NonPrivateDpEvent(), 2),)], math.inf),
    ],
)
def test_nothing_released_costs_nothing_and_no_noise_costs_everything(
    candidates: list, expected: float
) -> None:
    assert selection_epsilon(candidates, trials=TrialCount("geometric", 3), delta=1e-6) == expected


GAMMA = 0.0276193
LOGARITHMIC_MEAN = (1 / GAMMA - 1) / math.log(1 / GAMMA)


def law(distribution: str, mean: float, count: int) -> float:
    """The probability of a number of trials, written down from Papernot and Steinke 2022,
    Definition 1."""
    if distribution == "poisson":
        return math.exp(-mean) * mean**count / math.factorial(count)
    if count == 0:
        return 0.0
    if distribution == "geometric":
        return (1 / mean) * (1 - 1 / mean) ** (count - 1)
    return (1 - GAMMA) ** count / (count * math.log(1 / GAMMA))


def p_value(distribution: str, mean: float, *, drawn_mean: float) -> float:
    source = seeded_source(40387).child(distribution)
    drawn = [TrialCount(distribution, drawn_mean).draw(source) for _ in range(DRAWS)]
    single = [count for count in range(13) if DRAWS * law(distribution, mean, count) >= 5]
    expected = [DRAWS * law(distribution, mean, count) for count in single]
    seen = [drawn.count(count) for count in single]
    others = (DRAWS - sum(seen), DRAWS - sum(expected))
    return float(stats.chisquare([*seen, others[0]], [*expected, others[1]]).pvalue)


@pytest.mark.parametrize("distribution", SHAPES)
def test_numbers_of_trials_follow_their_law_and_not_one_with_another_mean(
    distribution: str,
) -> None:
    mean = LOGARITHMIC_MEAN if distribution == "logarithmic" else 6.0
    assert p_value(distribution, mean, drawn_mean=mean) > FALSE_ALARM
    assert p_value(distribution, mean, drawn_mean=1.3 * mean) < FALSE_ALARM
