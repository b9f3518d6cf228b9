"""The best of a random number of trials: published numbers, and the numbers of trials that are drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from dp_accounting import DpEvent, GaussianDpEvent, NonPrivateDpEvent, PoissonSampledDpEvent
from scipy import stats

from discreet.accounting.accounting import Entries, epsilon_spent
from discreet.privacy.randomness import seeded_source
from discreet.privacy.selection import SHAPES, TrialCount, selection_event

DRAWS = 4000
FALSE_ALARM = 1e-6  # of each chi-square test below; the seeds are fixed, so it is paid once


def training(noise: float = 1.0, *, probability: float = 0.01, rounds: int = 1000) -> tuple[tuple[DpEvent, int], ...]:
    return ((PoissonSampledDpEvent(probability, GaussianDpEvent(noise)), rounds),)


def selection_epsilon(candidates: Sequence[Entries], *, trials: TrialCount, delta: float) -> float:
    return epsilon_spent([(selection_event(candidates, trials=trials), 1)], delta=delta, accountant="rdp")


@pytest.mark.parametrize(
    ("distribution", "expected"), [("poisson", 4.671), ("logarithmic", 3.851), ("geometric", 4.431)]
)
def test_the_best_of_ten_on_average_costs_what_is_published(distribution: str, expected: float) -> None:
    found = selection_epsilon([training()], trials=TrialCount(distribution, 10), delta=1e-6)
    assert found == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("distribution", SHAPES)
def test_candidates_with_more_noise_change_nothing(distribution: str) -> None:
    trials = TrialCount(distribution, 5)
    dearest = selection_epsilon([training(1.0)], trials=trials, delta=1e-6)
    mixed = selection_epsilon([training(3.0), training(1.0), training(2.0)], trials=trials, delta=1e-6)
    # Orders that RDP can't compute for one of the candidates are given up for all: the bound may grow by a little.
    assert dearest <= mixed <= dearest * 1.01


def test_candidates_of_which_none_costs_most_are_refused() -> None:
    candidates = [training(1.0), training(4.0, probability=0.1)]
    with pytest.raises(ValueError, match="none costs most"):
        selection_epsilon(candidates, trials=TrialCount("poisson", 5), delta=1e-6)


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [([()], 0.0), ([((NonPrivateDpEvent(), 1),)], math.inf), ([training(), ((NonPrivateDpEvent(), 2),)], math.inf)],
)
def test_nothing_released_costs_nothing_and_no_noise_costs_everything(candidates: list, expected: float) -> None:
    assert selection_epsilon(candidates, trials=TrialCount("geometric", 3), delta=1e-6) == expected


GAMMA = 0.0276193
LOGARITHMIC_MEAN = (1 / GAMMA - 1) / math.log(1 / GAMMA)


def law(distribution: str, mean: float, count: int) -> float:
    """The probability of a number of trials, written down from Papernot and Steinke 2022, Definition 1."""
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
def test_numbers_of_trials_follow_their_law_and_not_one_with_another_mean(distribution: str) -> None:
    mean = LOGARITHMIC_MEAN if distribution == "logarithmic" else 6.0
    assert p_value(distribution, mean, drawn_mean=mean) > FALSE_ALARM
    assert p_value(distribution, mean, drawn_mean=1.3 * mean) < FALSE_ALARM
