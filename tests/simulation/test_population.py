"""A large population costs nothing until its clients take part."""

from __future__ import annotations

import tracemalloc

from discreet.privacy.randomness import seeded_source
from discreet.privacy.sampling import poisson_sample
from discreet.server.round import CohortSampling

MANY = 10**6


def test_drawing_a_cohort_of_a_million_takes_the_memory_of_the_cohort() -> None:
    sampling = CohortSampling("poisson", 100 / MANY, MANY)
    tracemalloc.start()
    cohort = sampling.draw(range(MANY), seeded_source(33091))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 20 < len(cohort) < 200
    assert peak < 2_000_000


def test_a_large_draw_is_that_of_one_stream() -> None:
    words = seeded_source(33091).words(100_000)
    chosen = poisson_sample(100_000, probability=0.25, source=seeded_source(33091))
    assert chosen.tolist() == [number for number, word in enumerate(words.tolist()) if word < 2**62]
