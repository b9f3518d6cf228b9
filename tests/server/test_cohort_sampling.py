"""Who is asked is drawn as it is accounted: whoever is connected, and also where nobody is drawn.

Draws are from a seed fixed beforehand; the false-alarm rate over its choice is ALARM for each.
"""

from __future__ import annotations

import tracemalloc
from collections import Counter

from scipy import stats

from discreet.privacy.randomness import seeded_source
from discreet.server.round import CohortSampling

DRAWS, ALARM = 3000, 1e-9


def p_value(sampling: CohortSampling, members: range, chances: list[float]) -> float:
    """Chi-square test of the cohorts' sizes, which have these chances."""
    source = seeded_source(73009)
    sizes = Counter(len(sampling.draw(members, source)) for _ in range(DRAWS))
    assert max(sizes) < len(chances)
    seen = [sizes[size] for size in range(len(chances))]
    return float(stats.chisquare(seen, [DRAWS * chance for chance in chances]).pvalue)


def test_a_poisson_cohort_is_empty_as_often_as_it_should_be() -> None:
    sampling, chances = CohortSampling("poisson", 0.3, 3), [0.343, 0.441, 0.189, 0.027]
    assert p_value(sampling, range(3), chances) > ALARM
    not_empty = [1e-9, *(chance / (1 - 0.343) for chance in chances[1:])]
    assert p_value(sampling, range(3), not_empty) < ALARM


def test_a_fixed_size_cohort_is_drawn_from_the_population_not_from_who_is_connected() -> None:
    sampling = CohortSampling("fixed", 0.5, 4)
    assert p_value(sampling, range(2), [1 / 6, 4 / 6, 1 / 6]) > ALARM
    assert p_value(sampling, range(2), [1 / 4, 2 / 4, 1 / 4]) < ALARM
    assert {len(sampling.draw(range(4), seeded_source(seed))) for seed in range(9)} == {2}


def test_drawing_a_cohort_of_a_million_takes_the_memory_of_the_cohort() -> None:
    tracemalloc.start()
    cohort = CohortSampling("poisson", 1e-4, 10**6).draw(range(10**6), seeded_source(33091))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 20 < len(cohort) < 200
    assert peak < 2_000_000
