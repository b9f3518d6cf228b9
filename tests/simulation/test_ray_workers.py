"""Chunks of clients as tasks of Ray: the numbers of the other engines, and nothing that two tasks share by chance."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("ray")
import ray

from discreet.server.plan import planned
from discreet.server.run_folder import RunFolder
from discreet.settings.compose import load_config
from discreet.settings.rules import ConfigError
from discreet.simulation.cohort import Engine
from discreet.simulation.in_process import check, simulate
from discreet.simulation.ray_cluster import RayCluster, RayWorkers, connected
from tests.simulation.chunks import Clients
from tests.simulation.test_cohort import ALIKE, BatchedTransport, charges, kept

SMALL = (
    *("seed=64019", "rounds=1", "data.num_clients=5", "training.epochs=1", "training.batch_size=64"),
    *("model.name=linear", "sampling.kind=everyone", "privacy.accountant=rdp", "privacy.user.too_noisy=warn"),
)
NOISED = "privacy.user.noise_multiplier=1"
NO_USER = "privacy.user.enabled=false"
RUNS = {
    "user level": (NOISED, "training.batch_size=8", "data.num_clients=40"),
    "example level": (NOISED, "privacy.example.enabled=true", "privacy.example.noise_multiplier=0.9"),
    "an own model with dropout": (NOISED, "model.name=benchmarks.own_models:dropping"),
    "local": (NO_USER, "privacy.local.epsilon=20", "privacy.local.kind=gaussian"),
    "secure": (NOISED, "privacy.user.aggregation=secure"),
    "shared step": (
        *(NO_USER, "privacy.example.enabled=true", "privacy.example.aggregation=secure", "training.batch_size=300"),
        *("privacy.example.noise_multiplier=1", "training.momentum=0"),
    ),
    "rated": (NOISED, "evaluation.kind=private", "evaluation.every=1", "evaluation.noise_multiplier=2"),
}
# Ray leaves files of its processes to the collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::FutureWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Two CPUs of this machine."""
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=2**27)
    with connected(None) as found:
        yield found
    ray.shutdown()


@pytest.mark.parametrize("name", RUNS)
def test_the_numbers_are_those_of_forked_workers_to_the_last_bit(
    name: str, cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    found = []
    for engine in ("batched", "ray"):
        simulate(load_config([*SMALL, *RUNS[name], f"engine={engine}", f"output_dir={tmp_path / engine}"]))
        folder = RunFolder(tmp_path / engine)
        rows = [{key: value for key, value in row.items() if key != "seconds"} for row in folder.read_metrics()]
        found.append((folder.load_checkpoint().params.tolist(), charges(folder), rows))
    assert found[0] == found[1]


def test_without_a_seed_no_task_repeats_the_draws_of_another(cluster: RayCluster) -> None:
    """What tells these clients apart is the order of their examples: two of 20 are alike once in 10^20 runs."""
    some = Clients("logistic_regression", (4,), (30, 3))
    run = load_config([*SMALL, "seed=null", "training.batch_size=2", "privacy.noise=float", NOISED])
    engine = Engine(some.shared, ALIKE, some.layers, chunk=1, workers=1)
    with BatchedTransport(planned(run), engine, accounts=None, workers=partial(RayWorkers, cluster=cluster)) as asked:
        replies = asked.ask(round_number=1, params=some.start, clip_norm=0.1, cohort=range(20))
        assert len({tuple(kept(one).values.tolist()) for one in replies}) == 20


@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU on this machine")
def test_a_chunk_that_asks_for_a_gpu_is_trained_there(cluster: RayCluster, tmp_path: Path) -> None:
    ends = []
    for words in (["engine=batched"], ["engine=ray", "ray.num_gpus=0.5"]):
        folder = f"output_dir={tmp_path / words[0]}"
        ends.append(simulate(load_config([*SMALL, *RUNS["user level"], *words, folder])).checkpoint.params)
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["device=cuda"], r"device must be cpu with engine=ray"),
        (
            [NO_USER, "privacy.local.epsilon=9", "privacy.local.kind=laplace_step", "training.epochs=1"],
            r"engine=ray does not cover",
        ),
        (["ray.num_gpus=2"], r"ray\.num_gpus must be within \[0, 1\]"),
    ],
)
def test_what_ray_does_not_do_is_refused_before_it_starts(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(load_config(["engine=ray", *words]))
