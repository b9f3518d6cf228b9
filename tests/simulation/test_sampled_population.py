"""A population of any size from the command line: clients are client_examples of the data, and none is held."""

from __future__ import annotations

import tracemalloc

import torch

from discreet.data.datasets import load_task
from discreet.node.nodes import share_of
from discreet.privacy.randomness import seeded_source
from discreet.server.plan import planned
from discreet.server.round import CohortSampling
from discreet.settings.compose import load_config
from discreet.settings.settings import Settings
from discreet.simulation.engine import engine_of

MILLION = 10**6
WORDS = [
    *("data.partition=sampled", f"data.num_clients={MILLION}", "data.examples_per_client=10", "privacy.delta=1e-7"),
    *("privacy.user.noise_multiplier=0.5", "sampling.probability=0.00005", "model.name=logistic_regression"),
]


def test_a_client_views_the_same_examples_wherever_it_runs() -> None:
    config = load_config(WORDS)
    task = load_task("digits")
    client_examples = engine_of(planned(config), task).client_examples
    for client in (0, 7, MILLION - 1):
        viewed = task.train.subset(torch.from_numpy(client_examples.examples(client)))
        held = share_of(config.data, client)
        assert len(held) == 10
        assert torch.equal(held.inputs, viewed.inputs)
        assert torch.equal(held.targets, viewed.targets)


def not_covered(config: Settings) -> list[str]:
    return [
        said for guarantee in planned(config).guarantees for said in guarantee.not_covered if "views overlap" in said
    ]


def test_every_guarantee_says_that_views_overlap() -> None:
    assert len(not_covered(load_config(WORDS))) == 3
    assert not_covered(load_config()) == []


def test_drawing_a_cohort_of_a_million_takes_the_memory_of_the_cohort() -> None:
    sampling = CohortSampling("poisson", 100 / MILLION, MILLION)
    tracemalloc.start()
    cohort = sampling.draw(range(MILLION), seeded_source(33091))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 20 < len(cohort) < 200
    assert peak < 2_000_000
