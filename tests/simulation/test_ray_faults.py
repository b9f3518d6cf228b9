"""A process or a machine is killed in the middle of a round: the run is the undisturbed one, and
nobody pays twice."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
import ray
from ray.cluster_utils import Cluster
from torch import Tensor

from discreet.mechanisms.sums import PartialReply
from discreet.run_files.compose import load_asked
from discreet.run_files.run_folder import RunFolder
from discreet.simulation import ray_cluster
from discreet.simulation.in_process import simulate
from discreet.simulation.processes import RunLostError
from discreet.simulation.ray_cluster import RETRIES, RayCluster, RayWorkers, connected
from tests.simulation.test_cohort import charges

RUN = (
    "rounds=3",
    "data.num_clients=5",
    "training.epochs=1",
    "training.batch_size=64",
    "model.name=linear",
    "sampling.kind=everyone",
    "privacy.accountant=rdp",
    "privacy.user.too_noisy=warn",
    "privacy.delta=1e-3",
    "privacy.example.enabled=true",
    "privacy.example.noise_multiplier=0.9",
    "privacy.user.noise_multiplier=1",
)
SEEDED = "seed=64019"
ROUND = 2  # in which a process or a machine is lost
pytestmark = [
    pytest.mark.slow,
    # Ray leaves files of its processes to the collector.
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning",
        "ignore::FutureWarning",
        "ignore::pytest.PytestUnraisableExceptionWarning",
    ),
]
FEW_PROCESSES = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
SMALL_NODE = {"num_cpus": 1, "object_store_memory": 2**27}


@dataclass(frozen=True)
class Dying:
    """Trains as `trainer` does, and kills its process, or its machine, in round 2: the first time,
    or `always`.

    A machine is killed while another chunk waits on the head, so that it has work. `folder` gets a
    file for each chunk that was trained and lost, with its sum.
    """

    trainer: Any
    folder: Path
    machine: bool = False
    always: bool = False
    head: str = ""

    @property
    def is_exact(self) -> bool:
        return bool(self.trainer.is_exact)

    def on(self, device: str) -> Dying:
        return replace(self, trainer=self.trainer.on(device))

    def replies(self, params: Tensor, work: Any) -> PartialReply:
        replies: PartialReply = self.trainer.replies(params, work)
        if work.request.round == ROUND:
            if self.machine and ray.get_runtime_context().get_node_id() == self.head:
                while not self.lost():
                    time.sleep(0.1)
            elif self.always or not self.lost():
                self._die(replies)
        return replies

    def lost(self) -> list[list[float]]:
        """The sums that were lost."""
        return [
            [float(word) for word in file.read_text().split()]
            for file in sorted(self.folder.glob("*.sum"))
        ]

    def _die(self, replies: PartialReply) -> None:
        draft = self.folder / f"{os.getpid()}.draft"
        draft.write_text(" ".join(map(str, replies.values.tolist())))
        draft.rename(draft.with_suffix(".sum"))
        os.kill(os.getppid() if self.machine else os.getpid(), signal.SIGKILL)
        time.sleep(60)


@pytest.fixture(scope="module")
def machines() -> Iterator[Cluster]:
    """Two machines of one CPU each."""
    found = Cluster(initialize_head=True, head_node_args=SMALL_NODE | FEW_PROCESSES)
    found.add_node(**SMALL_NODE)
    yield found
    found.shutdown()


@pytest.fixture(scope="module")
def cluster(machines: Cluster) -> Iterator[RayCluster]:
    with connected(machines.address) as found:
        yield found


@pytest.fixture(autouse=True)
def _two_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})


def run(folder: Path, *words: str) -> tuple[Any, ...]:
    """What a run leaves: its model, what its clients were charged, and its rows."""
    simulate(*load_asked([*RUN, *words, f"output_dir={folder}"]))
    found = RunFolder(folder)
    checkpoint = found.load_checkpoint()
    rows = [
        {key: value for key, value in row.items() if key != "seconds"}
        for row in found.read_metrics()
    ]
    return checkpoint.params.tolist(), charges(found), rows


def plant(folder: Path, patch: pytest.MonkeyPatch, **fault: Any) -> list[Dying]:
    """Every run that starts now loses what the fault says; the trainers that it had."""
    planted: list[Dying] = []

    def workers(trainer: Any, *, cluster: RayCluster, num_gpus: float) -> Any:
        planted.append(Dying(trainer, folder, **fault))
        return RayWorkers(planted[0], cluster=cluster)

    patch.setattr(ray_cluster, "RayWorkers", workers)
    return planted


@pytest.mark.parametrize("machine", [False, True], ids=["process", "machine"])
def test_a_lost_process_or_machine_changes_no_number(
    machine: bool,
    cluster: RayCluster,
    machines: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    undisturbed = run(tmp_path / "undisturbed", SEEDED, "engine=batched")
    cluster.check_nodes()
    assert cluster.has("CPU") == 2
    planted = plant(tmp_path, monkeypatch, machine=machine, head=machines.head_node.node_id)
    assert run(tmp_path / "disturbed", SEEDED, "engine=ray") == undisturbed
    assert len(planted[0].lost()) == 1
    if machine:
        assert cluster.has("CPU") == 1
        (gone,) = machines.worker_nodes
        machines.remove_node(gone, allow_graceful=False)
        machines.add_node(**SMALL_NODE)
        assert cluster.has("CPU") == 2


def test_a_chunk_that_is_lost_again_and_again_ends_the_run_which_can_go_on(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = run(tmp_path / "undisturbed", SEEDED, "engine=batched")
    with monkeypatch.context() as patch:
        planted = plant(tmp_path, patch, always=True)
        with pytest.raises(
            RunLostError,
            match=r"^Ray gave up a chunk of clients, .*: is there enough memory\? \S.*$",
        ):
            run(tmp_path / "disturbed", SEEDED, "engine=ray")
    # Two chunks were lost again and again until the first of them was given up.
    assert 1 + RETRIES <= len(planted[0].lost()) <= 2 * (1 + RETRIES)
    params, charged, rows = run(tmp_path / "disturbed", SEEDED, "engine=ray", "resume=true")
    assert (params, len(rows)) == (undisturbed[0], 3)
    # Clients are charged before they train, and the server before it releases, which it did not.
    again = [row for row in undisturbed[1] if row[:2] == (2, "example")]
    assert sorted(charged) == sorted([*undisturbed[1], *again])


def test_without_a_seed_a_chunk_that_is_done_again_draws_anew(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise of DP-SGD on 60 parameters, twice the same by chance: less than once in 10^20 runs."""
    seen: list[list[float]] = []
    replies = RayWorkers.replies

    def watched(self: Any, params: Tensor, works: Any) -> Iterator[Any]:
        for each in replies(self, params, works):
            seen.append(each.values.tolist())
            yield each

    planted = plant(tmp_path, monkeypatch)
    monkeypatch.setattr(RayWorkers, "replies", watched)
    _, charged, rows = run(tmp_path / "run", "engine=ray")
    assert len(seen) == 6  # three rounds of two chunks, each once
    (lost,) = planted[0].lost()
    assert lost not in seen
    by_client = [(row[0], row[2]) for row in charged if row[1] == "example"]
    assert sorted(by_client) == [(n, f"{c}") for n in (1, 2, 3) for c in range(5)]
    assert [row["replies"] for row in rows] == [5, 5, 5]
