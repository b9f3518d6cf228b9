"""A whole run with clients trained together is the run with clients trained one after the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import cohort_scale_speed as cohort_scale_speed
from benchmarks import cohort_speed as cohort_speed
from benchmarks import ray_speed
from benchmarks.cohort_speed import digits_like
from benchmarks.own_models import OWN
from discreet.data.datasets import load_task
from discreet.data.examples import Examples
from discreet.data.partition import ClientExamples, PartitionedExamples, SampledExamples
from discreet.ledger.durable_ledger import DurableLedger
from discreet.mechanisms.sums import CohortSum, PartialReply
from discreet.models.fixed_part import behind_fixed
from discreet.models.models import MODELS, build_model, flatten_parameters
from discreet.node.account import Refused
from discreet.node.admission import Admitted, admit
from discreet.node.work import Work
from discreet.per_example.objective import cross_entropy
from discreet.planning.plan import Plan, planned
from discreet.privacy.clipping import ClippedSum
from discreet.protocol.messages import TrainReply, TrainRequest
from discreet.run_files.compose import load_asked, load_config
from discreet.run_files.run_folder import RunFolder
from discreet.server.transport import Failure
from discreet.settings.rules import ConfigError
from discreet.settings.training import TaskConfig
from discreet.simulation.chunk import Chunk, shared_examples
from discreet.simulation.chunk_choice import trains_together
from discreet.simulation.cohort import BatchedTransport, engine_of
from discreet.simulation.dual_form import dual_updates
from discreet.simulation.in_process import InProcessTransport, simulate
from discreet.simulation.layer_sequence import sequence_of
from discreet.simulation.mapped_model import MappedModel, mapped_model
from tests.command import plan as plan_command
from tests.sequences import LAYERS
from tests.sequences import folder as sequence_folder
from tests.simulation.chunks import Clients

pytestmark = pytest.mark.usefixtures("with_workers")

ENGINES = ("sequential", "batched")
SMALL = (
    "seed=64019",
    "rounds=2",
    "data.num_clients=41",
    "sampling.probability=0.4",
    "training.epochs=1",
    "model.name=logistic_regression",
    "privacy.delta=1e-3",
    "privacy.user.noise_multiplier=0.8",
)
FLOAT = "privacy.noise=float"
EXAMPLE = ("privacy.example.enabled=true", "privacy.example.noise_multiplier=0.9")
LOCAL = ("privacy.user.enabled=false", "privacy.local.epsilon=20")
RATED = (
    "evaluation.kind=private",
    "evaluation.every=2",
    "evaluation.noise_multiplier=2",
    "rounds=3",
)
FEW = ("data.num_clients=8", "sampling.kind=everyone", "training.batch_size=50")
SECURE = (
    "data.num_clients=5",
    "sampling.kind=everyone",
    "privacy.accountant=rdp",
    "training.batch_size=64",
    "privacy.secure.dropouts=1",
    "privacy.user.noise_multiplier=1",
    "privacy.user.too_noisy=warn",
)
TAGGING = (
    "data.name=folder",
    "data.num_clients=8",
    "data.partition=natural",
    f"model.name={LAYERS}",
    "training.batch_size=8",
    "sampling.kind=everyone",
    "server.momentum=0",
)
RUNS = {
    "user level": (FLOAT,),
    "on the grid": ("privacy.noise=grid",),
    "no privacy": ("privacy.user.enabled=false",),
    "turns, with correlated noise": (
        "sampling.kind=cyclic",
        "sampling.groups=3",
        "privacy.user.clip.kind=fixed",
        "privacy.user.correlation.kind=bsr",
        "privacy.user.too_noisy=warn",
    ),
    "a mechanism from outside": (
        "privacy.user.mechanism=tests.mechanisms.signs:Signs",
        "privacy.user.too_noisy=warn",
    ),
    "unequal clients": ("data.partition=dirichlet", "data.alpha=0.2", FLOAT, "model.name=mlp"),
    "example level, declared": (
        *EXAMPLE,
        "data.partition=dirichlet",
        "data.alpha=0.03",
        "data.public_num_examples=20",
    ),
    "example target": ("privacy.example.enabled=true", "privacy.example.target_epsilon=6", FLOAT),
    "example budget": (*EXAMPLE, "privacy.example.max_epsilon=3.2", FLOAT, "rounds=3"),
    "local laplace": (*LOCAL, "privacy.local.kind=laplace"),
    "local and example": (*LOCAL, "privacy.local.kind=gaussian", *EXAMPLE),
    "local budget": (
        *LOCAL,
        "privacy.local.kind=gaussian",
        "privacy.local.max_epsilon=10",
        "rounds=3",
    ),
    "too many examples for delta": (*EXAMPLE, "privacy.user.enabled=false", "privacy.delta=0.03"),
    "a million clients": (
        "data.partition=sampled",
        "data.num_clients=1000000",
        "data.examples_per_client=10",
        "privacy.delta=1e-7",
        "sampling.probability=0.00005",
        "privacy.user.noise_multiplier=0.5",
    ),
    "rated": (*RATED, "evaluation.cohort=own"),
    "rated by the same cohort": (*RATED, "evaluation.cohort=same"),
    "rated, own noise": (
        *RATED,
        *FEW,
        *EXAMPLE,
        "privacy.user.enabled=false",
        "evaluation.cohort=own",
    ),
    "rated, local laplace": (
        *RATED,
        *LOCAL,
        "privacy.local.kind=laplace",
        "sampling.kind=everyone",
    ),
    "secure": (*SECURE, "privacy.user.aggregation=secure"),
    "secure, rated by the same cohort": (
        *SECURE,
        "privacy.user.aggregation=secure",
        *RATED,
        "evaluation.cohort=same",
    ),
    "shared step": (
        *SECURE,
        *EXAMPLE,
        "privacy.user.enabled=false",
        "privacy.example.aggregation=secure",
        "privacy.user.target_epsilon=null",
        "training.batch_size=300",
        "training.momentum=0",
    ),
    "numbers, huber, by DP-SGD": (
        "data.name=diabetes",
        "model.name=linear",
        "task.loss=huber",
        *EXAMPLE,
        FLOAT,
    ),
    "classes with weights": (
        "data.name=breast_cancer",
        "model.name=linear",
        "task.class_weights=[2,0.5]",
        FLOAT,
    ),
    "sequences, by DP-SGD": (*TAGGING, *EXAMPLE, FLOAT),
    "sequences, rated": (*TAGGING, *RATED, "evaluation.metrics=[accuracy,loss]"),
}


def run(folder: Path, engine: str, *words: str) -> RunFolder:
    simulate(*load_asked([*SMALL, *words, f"engine={engine}", f"output_dir={folder / engine}"]))
    return RunFolder(folder / engine)


def charges(folder: RunFolder) -> list[tuple[object, ...]]:
    """All that a run has charged, in both of its ledgers."""
    found: list[tuple[object, ...]] = []
    for path in (folder.ledger_path, folder.clients_ledger_path):
        if path.exists():
            ledger = DurableLedger(path)
            assert ledger.verify() == []
            rows = ledger.releases()
            found += sorted(
                (row.round, row.guarantee, row.data_owner, row.event, row.count) for row in rows
            )
    return found


@pytest.mark.parametrize("name", RUNS)
def test_both_engines_give_one_run(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words, refusals = RUNS[name], []
    if TAGGING[0] in words:
        words = (*words, f"data.path={sequence_folder(tmp_path / 'data')}")
    folders = []
    for engine in ENGINES:
        caplog.clear()
        folders.append(run(tmp_path, engine, *words))
        refusals.append(
            {record.message for record in caplog.records if "refused" in record.message}
        )
    alone, together = folders
    assert refusals[0] == refusals[1]
    assert any("level budget is spent" in line for line in refusals[0]) == ("budget" in name)
    assert charges(together) == charges(alone)
    one, other = alone.load_checkpoint(), together.load_checkpoint()
    torch.testing.assert_close(other.params, one.params, rtol=1e-3, atol=2e-5)
    for before, after in zip(alone.read_metrics(), together.read_metrics(), strict=True):
        known = [name for name in before if name != "seconds" and before[name] is not None]
        assert [after[name] for name in known] == pytest.approx(
            [before[name] for name in known], rel=1e-4
        )
    assert ({row["replies"] for row in alone.read_metrics()} == {0}) == (
        name == "too many examples for delta"
    )


def test_what_is_not_batched_is_trained_sequentially_or_refused_if_requested(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "discreet"):
        run(tmp_path, "auto", *LOCAL, "privacy.local.kind=laplace_step")
    assert sum("laplace_step is not batched" in record.message for record in caplog.records) == 1
    with pytest.raises(ConfigError, match=r"engine=batched .*privacy\.local\.kind=laplace_step"):
        run(tmp_path, "batched", *LOCAL, "privacy.local.kind=laplace_step")


ALIKE = PartitionedExamples.of([torch.arange(30)] * 40)  # clients who all hold the same examples


def test_without_a_seed_no_chunk_repeats_the_draws_of_another() -> None:
    """What tells these clients apart is the order of their examples: two of 40 are alike once in
    10^20 runs."""
    found: list[PartialReply] = []
    start = Clients("logistic_regression", (4,), (30, 3)).start
    for _ in range(2):
        with exchange(1, 1, "seed=null", client_examples=ALIKE) as asked:
            found += [
                kept(part)
                for part in asked.ask(TrainRequest(2, 0.1, asked.plan.run), start, range(20))
            ]
    assert len({tuple(each.values.tolist()) for each in found}) == 40


def exchange(
    chunk: int, workers: int, *words: str, client_examples: ClientExamples | None = None
) -> BatchedTransport:
    some = Clients("logistic_regression", (4,), (30, 3))
    client_examples = client_examples or SampledExamples(10**6, len(some.data), 5, seed=31)
    config = load_config(
        [
            *SMALL,
            "seed=7",
            "training.batch_size=2",
            FLOAT,
            "privacy.user.noise_multiplier=1",
            *words,
        ]
    )
    plan = Plan(config)
    return BatchedTransport(plan, some.engine(plan, client_examples, chunk, workers), accounts=None)


def sum_of(chunk: int, workers: int, cohort: list[int]) -> PartialReply:
    """The replies of a cohort that is cut so, added up."""
    start = Clients("logistic_regression", (4,), (30, 3)).start
    total = CohortSum(ClippedSum(len(start), 0.1))
    with exchange(chunk, workers) as asked:
        for part in asked.ask(TrainRequest(2, 0.1, asked.plan.run), start, cohort):
            total.take(kept(part))
    return total.part()


def kept(part: PartialReply | Failure) -> PartialReply:
    """A copy: the sum is overwritten by what comes next."""
    assert isinstance(part, PartialReply)
    return replace(part, values=part.values.clone())


@pytest.mark.parametrize(("chunk", "workers"), [(1, 1), (3, 2), (100, 2)])
def test_how_a_cohort_is_cut_does_not_change_what_it_replies(chunk: int, workers: int) -> None:
    cohort = [999_999, 0, 17, 333_333, 5, 6, 7]
    one, other = sum_of(chunk, workers, cohort), sum_of(4, 1, cohort)
    torch.testing.assert_close(one.values, other.values, rtol=1e-4, atol=1e-6)
    assert (one.below, one.replies) == (other.below, other.replies)


def test_one_by_one_no_client_rounds_another(tmp_path: Path) -> None:
    # Trained together they do: docs/privacy.md, rounding of other simulated clients.
    words = ("data.partition=dirichlet", "data.alpha=0.3", "training.batch_size=512")
    plan = Plan(load_config([*SMALL, *words, "privacy.user.noise_multiplier=1"]))
    transport = InProcessTransport(plan, str(tmp_path))
    start = torch.zeros(650)

    def updates(cohort: list[int]) -> dict[int, Tensor]:
        replies = transport.ask(TrainRequest(1, 0.1, plan.run), start, cohort)
        return {each.client: each.update for each in replies if isinstance(each, TrainReply)}

    without, with_more = updates([3, 5, 8]), updates([1, 3, 2, 5, 4, 8])
    assert [*without] == [3, 5, 8]
    assert all(torch.equal(without[client], with_more[client]) for client in without)


def test_a_large_client_leaves_the_form_in_which_others_are_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_dual_form: list[list[int]] = []

    def watched(chunk: Chunk, params: Tensor) -> Tensor:
        in_dual_form.append(chunk.table.sizes.tolist())
        return dual_updates(chunk, params)

    monkeypatch.setattr("discreet.simulation.cohort.dual_updates", watched)
    words = ["privacy.user.noise_multiplier=1", "training.batch_size=20", "model.name=linear"]
    plan, task = planned(load_config(words)), load_task("digits")
    sizes = [20, 20, 1300, 20, 17]
    parts = torch.arange(sum(sizes)).split(sizes)
    engine = engine_of(plan, task, dealt=PartitionedExamples.of(parts))
    engine = replace(engine, workers=1, chunk=100)
    start = torch.zeros(engine.model.layout.size)
    with BatchedTransport(plan, engine, accounts=None) as transport:
        list(transport.ask(TrainRequest(1, 0.1, plan.run), start, range(len(sizes))))
    assert in_dual_form == [[20, 20, 20, 17]]


def test_no_more_than_a_few_chunks_are_trained_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    admitted: list[int] = []

    def watched(work: Work, sizes: dict[str, int], **how: Any) -> dict[str, Admitted | Refused]:
        admitted.extend(map(int, sizes))
        return admit(work, sizes, **how)

    monkeypatch.setattr("discreet.simulation.cohort.admit", watched)
    start = Clients("logistic_regression", (4,), (30, 3)).start
    with exchange(2, 2) as asked:
        next(iter(asked.ask(TrainRequest(1, 0.1, asked.plan.run), start, range(1000))))
    assert 2 <= len(admitted) <= 10  # 5 chunks of 2


# least_squares trains for one round, each client alone under vmap
@pytest.mark.parametrize("name", sorted({*MODELS} - {"lstm", "least_squares"}))
def test_every_model_of_images_has_its_passes_by_hand(name: str) -> None:
    images = Examples(torch.zeros(1, 1, 28, 28), torch.zeros(1, dtype=torch.int64))
    learned, features = behind_fixed(build_model(name, (1, 28, 28), 10, seed=5), images)
    assert sequence_of(learned, features.inputs.shape[1:]) is not None


@pytest.mark.parametrize("level", ["user", "example"])
@pytest.mark.parametrize("name", OWN)
def test_own_models_are_trained_together_unless_their_steps_would_be_many_calls(
    name: str, level: str
) -> None:
    words = [
        f"privacy.{level}.enabled=true",
        f"privacy.{level}.noise_multiplier=1",
        "training.batch_size=10",
    ]
    engine = engine_of(planned(load_config([*words, f"model.name={name}"])), load_task("digits"))
    assert isinstance(engine.model, MappedModel)
    draws = level == "example" and "dropping" in name  # each example by a key of its client
    assert engine.model.together == ("Recurrent" not in name and not draws)


def test_no_example_decides_whether_clients_are_trained_together() -> None:
    words = ["privacy.user.noise_multiplier=1", "training.batch_size=10"]
    plan = planned(load_config([*words, f"model.name={next(iter(OWN))}"]))
    task = load_task("digits")
    outlier = Examples(task.train.inputs.clone(), task.train.targets)
    outlier.inputs[0] = torch.nan
    engine = engine_of(plan, replace(task, train=outlier))
    assert isinstance(engine.model, MappedModel)
    assert engine.model.together


def test_what_vmap_follows_otherwise_than_one_client_goes_alone() -> None:
    """Its forward reads a weight that was made beforehand, which is no client's."""
    task = load_task("digits")
    model, data = Aliased(), shared_examples(task.train, torch.device("cpu"))
    assert mapped_model(model, cross_entropy).together
    assert not trains_together(
        mapped_model(model, cross_entropy), data, TaskConfig(), by_example=False
    )


class Aliased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.exit = nn.Linear(64, 10)
        self.kept = [self.exit.weight]

    def forward(self, images: Tensor) -> Tensor:
        return functional.linear(images.flatten(1), self.kept[0], self.exit.bias)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_updates() -> None:
    task, found = load_task("digits"), []
    for device in ("cpu", "cuda"):
        words = ["privacy.noise=float", "privacy.user.noise_multiplier=1", f"device={device}"]
        run = Plan(load_config(["seed=90001", "data.num_clients=40", "model.name=cnn", *words]))
        start = flatten_parameters(
            build_model("cnn", task.shape.input_shape, task.shape.num_classes, seed=5)
        )
        with BatchedTransport(run, engine_of(run, task), accounts=None) as exchange:
            replies = list(exchange.ask(TrainRequest(1, 0.1, exchange.plan.run), start, range(9)))
        found.append(sum(part.values for part in replies if isinstance(part, PartialReply)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-5)


def test_a_device_that_is_not_there_is_said_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device, said in (
        ("cuda", "device=cuda needs a GPU"),
        ("tpu", r"device must be cpu, cuda or cuda:NUMBER \(got tpu\)"),
    ):
        with pytest.raises(ConfigError, match=said):
            simulate(*load_asked([f"device={device}"]))


def test_a_plan_names_a_device_that_is_not_there_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert plan_command(["device=cuda:1"]) == 2
    said = "discreet: device must be cpu, cuda or up to cuda:0 (got cuda:1)\n"
    assert capfd.readouterr() == ("", said)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert plan_command(["device=cuda"]) == 2
    assert capfd.readouterr().err.startswith("discreet: device=cuda needs a GPU")


@pytest.mark.slow
def test_every_way_trains_clients() -> None:
    rows = cohort_speed.rows(
        models=["logistic_regression"], examples=600, clients=20, repetitions=1
    )
    assert {"sequential", "batched", "batched, sums on the grid", "DP-SGD, batched"} <= {
        row["way"] for row in rows
    }
    assert all(row["clients_per_second"] > 0 for row in rows)


@pytest.mark.slow
def test_a_large_population_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cohort_scale_speed, "digits_like", lambda: digits_like(200))
    rows = cohort_scale_speed.rows(scales=[(10**6, 20)], flute_rounds=2)
    assert [row["what"] for row in rows] == ["one round", "FLUTE's benchmark, 2 rounds"]


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_ray_is_measured_beside_forked_workers() -> None:
    rows = ray_speed.rows(models=["logistic_regression"], examples=600, repetitions=1)
    assert [row["way"] for row in rows] == list(ray_speed.WAYS)
