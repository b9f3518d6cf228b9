"""Chunks of clients as tasks of Ray: the numbers of the other engines, and nothing that two tasks share by chance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("ray")
import ray

from discreet.mechanisms.sums import PartialReply
from discreet.server.plan import planned
from discreet.server.run_folder import RunFolder
from discreet.settings.compose import load_config
from discreet.settings.rules import ConfigError
from discreet.simulation.engine import Engine
from discreet.simulation.in_process import check, simulate
from discreet.simulation.ray_cluster import RayCluster, connected
from discreet.simulation.ray_workers import RayWorkers
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


@dataclass(frozen=True)
class Scaled:
    """Gives parameters times the work; refuses work below 0."""

    is_exact: bool = True

    def on(self, device: str) -> Scaled:
        return self

    def replies(self, params: Tensor, work: float) -> PartialReply:
        if work < 0:
            raise ValueError(f"work must not be negative, not {work}")
        return PartialReply((params * work).double(), below=3, replies=2, clip_norm=0.5, epsilon_example=1.0)


def test_what_is_not_exact_comes_in_the_order_of_the_work(cluster: RayCluster) -> None:
    workers = RayWorkers(Scaled(is_exact=False), cluster=cluster)
    workers.begin(torch.tensor([1.0, 2.0]))
    found = [each.values.tolist() for each in workers.replies([5.0, 2.0, 3.0])]
    assert found == [[5.0, 10.0], [2.0, 4.0], [3.0, 6.0]]


def test_what_a_task_raises_is_raised_here(cluster: RayCluster) -> None:
    workers = RayWorkers(Scaled(), cluster=cluster)
    workers.begin(torch.ones(2))
    with pytest.raises(ValueError, match="work must not be negative"):
        next(workers.replies([-1.0]))


@dataclass
class Growing:
    """A cluster as `RayWorkers` asks it: CPUs by turns."""

    turns: list[int]
    gpus: int = 0
    cpus: int = 0
    checks: list[int] = field(default_factory=list)

    check_gpus = RayCluster.check_gpus

    def check_nodes(self) -> None:
        self.cpus = self.turns.pop(0)
        self.checks.append(self.cpus)


def test_a_machine_that_joined_is_used_from_the_next_round_and_one_that_is_lost_changes_no_cut(
    cluster: RayCluster,
) -> None:
    found: Any = Growing([2, 6, 4])
    workers, counts = RayWorkers(Scaled(), cluster=found), []
    for _ in range(3):
        workers.begin(torch.ones(1))
        counts.append(workers.count)
    assert counts == [2, 6, 6]
    assert found.checks == [2, 6, 4]


def test_tasks_ask_for_gpus_of_a_cluster_that_has_some() -> None:
    without: Any = Growing([])
    with pytest.raises(ConfigError, match=r"ray\.num_gpus must be 0 on this cluster, which has no GPU \(got 0\.5\)"):
        RayWorkers(Scaled(), cluster=without, num_gpus=0.5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU on this machine")
def test_a_chunk_that_asks_for_a_gpu_is_trained_there(cluster: RayCluster, tmp_path: Path) -> None:
    ends = []
    for words in (["engine=batched"], ["engine=ray", "ray.num_gpus=0.5"]):
        folder = f"output_dir={tmp_path / words[0]}"
        ends.append(simulate(load_config([*SMALL, *RUNS["user level"], *words, folder])).checkpoint.params)
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-3, atol=1e-4)


def test_an_engine_moves_with_all_that_its_clients_read() -> None:
    some = Clients("logistic_regression", (4,), (30, 3))
    moved = Engine(some.shared, ALIKE, some.layers, chunk=1, workers=1).on(torch.device("meta"))
    assert (moved.data.inputs.device.type, moved.data.targets.device.type, moved.chunk) == ("meta", "meta", 1)


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
