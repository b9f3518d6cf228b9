"""Chunks of clients and whole runs as tasks of Ray: the numbers of one after the other, and nothing
is forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")
import ray
import torch

from discreet.cli import sweep as cli
from discreet.ledger.durable_ledger import DurableLedger
from discreet.planning.plan import planned
from discreet.protocol.messages import TrainRequest
from discreet.run_files.call import Call
from discreet.run_files.compose import load_asked, load_config
from discreet.run_files.run_folder import RunFolder, state_of
from discreet.settings.rules import ConfigError
from discreet.settings.settings import Settings
from discreet.simulation import many_runs, ray_cluster
from discreet.simulation.in_process import check, simulate
from discreet.simulation.many_runs import Job, check_parallel, run_all
from discreet.simulation.ray_cluster import RayCluster, RayWorkers, connected
from tests.command import simulate as main
from tests.simulation.chunks import Clients
from tests.simulation.crash import plant
from tests.simulation.test_cohort import ALIKE, BatchedTransport, charges, kept

SMALL = (
    "rounds=2",
    "data.num_clients=20",
    "model.name=logistic_regression",
    "training.epochs=1",
    "privacy.user.noise_multiplier=2",
    "sampling.probability=0.3",
    "privacy.user.too_noisy=warn",
)
RATES = (0.5, 1, 2)
# Ray leaves files of its processes to the collector.
pytestmark = [
    pytest.mark.usefixtures("with_workers"),
    pytest.mark.processes,
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning",
        "ignore::FutureWarning",
        "ignore::pytest.PytestUnraisableExceptionWarning",
    ),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Two CPUs of this machine."""
    ray.init(
        "local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=2**27
    )
    with connected(None) as found:
        yield found
    ray.shutdown()


def job(folder: Path, work: Callable[[Settings, Call], object], *words: str) -> Job:
    config, call = load_asked([*SMALL, *words, f"output_dir={folder}"])
    return Job(folder.name, RunFolder(folder), planned(config), partial(work, config, call))


def run(*jobs: Job) -> dict[str, str]:
    return run_all(jobs, at_a_time=2, shared=jobs[0].folder.path.parent)


def fail(config: Settings, call: Call) -> None:
    raise TypeError("the loss is no tensor\nat all")


def die_after_a_charge(config: Settings, call: Call) -> None:
    """The process dies in round 2, once: its charge is on disk, and its checkpoint is not."""
    begun = (Path(str(call.output_dir)) / "ledger.db").exists()
    if not begun:
        plant("after_ledger", 2)
    simulate(*load_asked([*SMALL, f"output_dir={call.output_dir}", f"resume={begun}"]))


@pytest.mark.usefixtures("cluster")
def test_runs_side_by_side_have_the_numbers_of_sequential_runs_to_the_last_bit(
    tmp_path: Path,
) -> None:
    lists = ("seed=5501", "server.learning_rate=0.5,1,2")
    assert (
        main(["--multirun", "--jobs", "2", *SMALL, *lists, f"hydra.sweep.dir={tmp_path / 'sweep'}"])
        == 0
    )
    for number, rate in enumerate(RATES):
        words = [
            *SMALL,
            "seed=5501",
            f"server.learning_rate={rate}",
            f"output_dir={tmp_path / str(number)}",
        ]
        alone = simulate(*load_asked(words)).checkpoint
        beside = RunFolder(tmp_path / "sweep" / str(number)).load_checkpoint()
        assert beside.params.tolist() == alone.params.tolist()


@pytest.mark.usefixtures("cluster")
def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    failed = run(job(tmp_path / "one", fail), job(tmp_path / "two", simulate))
    assert failed == {"one": "TypeError: the loss is no tensor"}
    assert state_of(RunFolder(tmp_path / "two")) == "finished"
    assert "in fail" in (tmp_path / "one.log").read_text()  # all that the one line leaves out


@pytest.mark.usefixtures("cluster")
def test_a_run_that_is_killed_goes_on_and_pays_for_the_round_that_it_repeats(
    tmp_path: Path,
) -> None:
    assert run(job(tmp_path / "run", die_after_a_charge)) == {}
    folder = RunFolder(tmp_path / "run")
    assert [row["round"] for row in folder.read_metrics()] == [1, 2]
    assert [release.round for release in DurableLedger(folder.ledger_path).releases()] == [1, 2, 2]


@pytest.mark.usefixtures("cluster")
def test_a_machine_that_does_not_see_the_run_folders_is_refused(tmp_path: Path) -> None:
    with many_runs._token(tmp_path, "auto") as token, connected(None, token=token):
        pass
    assert list(tmp_path.iterdir()) == []
    said = r"must be on a path that all machines share: .* does not see it"
    with pytest.raises(ConfigError, match=said), connected(None, token=token):
        pass


def test_a_run_that_charges_an_account_stays_on_the_machine_of_the_sweep(
    cluster: RayCluster, tmp_path: Path
) -> None:
    words = ("privacy.user.account=people.db", "sampling.population_name=people")
    started: list[bool] = []
    watched: Any = SimpleNamespace(start=lambda *_, here, **__: started.append(here))
    for number, more in enumerate((words, ())):
        many_runs._started(job(tmp_path / str(number), simulate, *more), watched)
    assert started == [True, False]
    asked = cluster.start(node_of_task, here=True)
    assert ray_cluster.result(asked, "a task") == ray.get_runtime_context().get_node_id()


def node_of_task() -> str:
    return ray.get_runtime_context().get_node_id()


@pytest.mark.parametrize("known", [True, False])
def test_a_machine_takes_over_a_run_whose_ledger_the_sweep_knows(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = job(tmp_path / "run", simulate)
    assert begun.is_known()
    begun.work()
    monkeypatch.setenv("DISCREET_STATE", str(tmp_path / "another machine"))
    many_runs._attempt(replace(begun, work=lambda: None), tmp_path, known)
    assert begun.is_known() is known


TINY = (
    "rounds=1",
    "data.num_clients=10",
    "model.name=logistic_regression",
    "training.epochs=1",
    "seed=5501",
)


def test_a_run_that_fails_is_said_at_the_end_and_repeated_by_the_line_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(config: Settings, call: Call, **more: object) -> None:
        simulate(config, call, **more)  # type: ignore[arg-type]
        if config.server.learning_rate == 1:
            raise OSError("no space left")

    there = f"hydra.sweep.dir={tmp_path}"
    with monkeypatch.context() as patch:
        patch.setattr(many_runs, "simulate", failing)
        assert main(["--multirun", *TINY, "server.learning_rate=0.5,1,2", there]) == 1
    said = capsys.readouterr().out.splitlines()
    assert "run 3 of 3 (server.learning_rate=2) has ended: 3 of 3 runs, 1 failed" in said
    assert said[-3:] == [
        "1 of 3 runs failed:",
        "  run 2 of 3 (server.learning_rate=1): OSError: no space left",
        f"to repeat them: discreet simulate --multirun resume=true {there}",
    ]
    assert main(["--multirun", "resume=true", there]) == 0


def test_a_sweep_goes_on_on_another_cluster(tmp_path: Path) -> None:
    there = f"hydra.sweep.dir={tmp_path}"
    sweep = cli.sweep_of(["seed=1,2", "ray.address=auto", there], multirun=True)
    sweep.save()
    again = cli.sweep_of(["resume=true", "ray.address=head:6379", there], multirun=True)
    assert again.runs == (("seed=1", "ray.address=head:6379"), ("seed=2", "ray.address=head:6379"))


def test_runs_that_can_not_share_a_cluster_are_refused() -> None:
    check_parallel([planned(load_config(["ray.num_gpus=0.5"]))], ["cuda"])
    with pytest.raises(ConfigError, match=r"ray\.address must be the same"):
        check_parallel(
            [planned(load_config([f"ray.address={where}"])) for where in ("auto", "null")],
            ["cpu", "cpu"],
        )
    with pytest.raises(ConfigError, match=r"needs ray\.num_gpus"):
        check_parallel([planned(load_config())], ["cuda"])


ONE_ROUND = (
    "seed=64019",
    "rounds=1",
    "data.num_clients=5",
    "training.epochs=1",
    "training.batch_size=64",
    "model.name=linear",
    "sampling.kind=everyone",
    "privacy.accountant=rdp",
    "privacy.user.too_noisy=warn",
)
NOISED = "privacy.user.noise_multiplier=1"
NO_USER = "privacy.user.enabled=false"
KINDS = {
    "user level": (NOISED, "training.batch_size=8", "data.num_clients=40"),
    "example level": (
        NOISED,
        "privacy.example.enabled=true",
        "privacy.example.noise_multiplier=0.9",
    ),
    "an own model with dropout": (NOISED, "model.name=benchmarks.own_models:dropping"),
    "local": (
        NO_USER,
        "privacy.local.epsilon=20",
        "privacy.local.max_epsilon=30",
        "privacy.local.kind=gaussian",
    ),
    "secure": (NOISED, "privacy.user.aggregation=secure"),
    "shared step": (
        NO_USER,
        "privacy.example.enabled=true",
        "privacy.example.aggregation=secure",
        "training.batch_size=300",
        "privacy.example.noise_multiplier=1",
        "training.momentum=0",
    ),
    "rated": (
        NOISED,
        "evaluation.kind=private",
        "evaluation.every=1",
        "evaluation.noise_multiplier=2",
    ),
}
# Ray leaves files of its processes to the collector.


@pytest.mark.parametrize("name", KINDS)
def test_the_numbers_are_those_of_forked_workers_to_the_last_bit(
    name: str, cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    found = []
    for engine in ("batched", "ray"):
        simulate(
            *load_asked(
                [*ONE_ROUND, *KINDS[name], f"engine={engine}", f"output_dir={tmp_path / engine}"]
            )
        )
        folder = RunFolder(tmp_path / engine)
        rows = [
            {key: value for key, value in row.items() if key != "seconds"}
            for row in folder.read_metrics()
        ]
        found.append((folder.load_checkpoint().params.tolist(), charges(folder), rows))
    assert found[0] == found[1]


def test_without_a_seed_no_task_repeats_the_draws_of_another(cluster: RayCluster) -> None:
    """What tells these clients apart is the order of their examples: two of 20 are alike once in
    10^20 runs."""
    some = Clients("logistic_regression", (4,), (30, 3))
    config = load_config(
        [*ONE_ROUND, "seed=null", "training.batch_size=2", "privacy.noise=float", NOISED]
    )
    plan, workers = planned(config), partial(RayWorkers, cluster=cluster)
    with BatchedTransport(
        plan, some.engine(plan, ALIKE, 1, 1), accounts=None, workers=workers
    ) as asked:
        replies = asked.ask(TrainRequest(1, 0.1, asked.plan.run), some.start, range(20))
        assert len({tuple(kept(one).values.tolist()) for one in replies}) == 20


@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU on this machine")
def test_a_chunk_that_asks_for_a_gpu_is_trained_there(cluster: RayCluster, tmp_path: Path) -> None:
    ends = []
    for words in (["engine=batched"], ["engine=ray", "ray.num_gpus=0.5"]):
        folder = f"output_dir={tmp_path / words[0]}"
        ends.append(
            simulate(
                *load_asked([*ONE_ROUND, *KINDS["user level"], *words, folder])
            ).checkpoint.params
        )
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["device=cuda"], r"device must be cpu with engine=ray"),
        (
            [
                NO_USER,
                "privacy.local.epsilon=9",
                "privacy.local.kind=laplace_step",
                "training.epochs=1",
            ],
            r"engine=ray does not cover",
        ),
        (["ray.num_gpus=2"], r"ray\.num_gpus must be within \[0, 1\]"),
    ],
)
def test_what_ray_does_not_do_is_refused_before_it_starts(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(*load_asked(["engine=ray", *words]))
