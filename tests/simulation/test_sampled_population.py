"""A population of any size from the command line: clients are client_examples of the data, and none is held."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch

from discreet.data.datasets import load_task
from discreet.node.nodes import share_of
from discreet.privacy.randomness import seeded_source
from discreet.server.plan import planned
from discreet.server.round import CohortSampling
from discreet.server.run_folder import RunFolder
from discreet.settings.compose import load_config
from discreet.settings.rules import ConfigError
from discreet.settings.settings import Settings
from discreet.simulation.engine import engine_of
from discreet.simulation.in_process import simulate

ROOT = Path(__file__).resolve().parent.parent.parent
MILLION = 10**6
WORDS = [
    "data.partition=sampled",
    f"data.num_clients={MILLION}",
    "data.examples_per_client=10",
    "privacy.user.noise_multiplier=0.5",
    "privacy.delta=1e-7",
    "sampling.probability=0.00005",
    "model.name=logistic_regression",
    "training.epochs=1",
    "rounds=2",
    "seed=52081",
]


def run(folder: Path, *words: str) -> RunFolder:
    simulate(load_config([*WORDS, *words, f"output_dir={folder}"]))
    return RunFolder(folder)


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


def test_a_view_larger_than_the_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.examples_per_client must be at most the 1437 training examples"):
        run(tmp_path / "run", "data.examples_per_client=1438")


def not_covered(config: Settings) -> list[str]:
    return [
        said for guarantee in planned(config).guarantees for said in guarantee.not_covered if "views overlap" in said
    ]


def test_every_guarantee_says_that_views_overlap() -> None:
    assert len(not_covered(load_config(WORDS))) == 3
    assert not_covered(load_config()) == []


PEAK = """
import resource, sys
from discreet.settings.compose import load_config
from discreet.simulation.in_process import simulate
simulate(load_config(sys.argv[1:]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_population(tmp_path: Path) -> None:
    """A thousand times the clients, the same cohort: a list of them alone would take 8 MB, and a view each 200 MB."""
    peaks = []
    for population in (MILLION // 1000, MILLION):
        words = [
            f"data.num_clients={population}",
            f"sampling.probability={50 / population}",
            f"output_dir={tmp_path}/{population}",
        ]
        command = [sys.executable, "-c", PEAK, *WORDS, *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout.split()[-1]))
    unit = 1 if sys.platform == "darwin" else 1024
    assert (peaks[1] - peaks[0]) * unit < 40 * 2**20


MANY = 10**6


def test_drawing_a_cohort_of_a_million_takes_the_memory_of_the_cohort() -> None:
    sampling = CohortSampling("poisson", 100 / MANY, MANY)
    tracemalloc.start()
    cohort = sampling.draw(range(MANY), seeded_source(33091))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 20 < len(cohort) < 200
    assert peak < 2_000_000
