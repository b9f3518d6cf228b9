"""A whole run with clients trained together is the run with clients trained one by one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from discreet.ledger.durable_ledger import DurableLedger
from discreet.mechanisms.sums import CohortSum, PartialReply
from discreet.models.models import MODELS
from discreet.node import nodes
from discreet.node.account import Refused
from discreet.node.admission import Admitted, admit
from discreet.protocol.messages import TrainRequest
from discreet.server.run_folder import RunFolder
from discreet.server.transport import Failure
from discreet.settings.compose import load_config
from discreet.settings.rules import ConfigError
from discreet.simulation.client_examples import ClientExamples, Numbers, SampledExamples
from discreet.simulation.cohort import BatchedTransport
from discreet.simulation.engine import Engine
from discreet.simulation.in_process import simulate
from tests.simulation.chunks import Clients

SMALL = (
    "seed=64019",
    "rounds=2",
    "data.num_clients=41",
    "sampling.probability=0.4",
    "training.epochs=1",
    "model.name=logistic_regression",
    "privacy.delta=1e-3",
)
FLOAT = "privacy.noise=float"
EXAMPLE = ("privacy.example.enabled=true", "privacy.example.noise_multiplier=0.9")
LOCAL = ("privacy.user.enabled=false", "privacy.local.epsilon=20")
RUNS = {
    "user level": (FLOAT,),
    "on the grid": ("privacy.noise=grid",),
    "secure mode": ("privacy.noise=secure_sum", *EXAMPLE),
    "no privacy": ("privacy.user.enabled=false",),
    "momentum, epochs": ("training.momentum=0.5", "training.epochs=3", FLOAT),
    "adam": ("training.optimizer=adam", "training.learning_rate=0.01", "data.partition=dirichlet", FLOAT),
    "example level, adamw": (*EXAMPLE, "training={optimizer:adamw,weight_decay:0.1,learning_rate:0.01}", FLOAT),
    "unequal clients": ("data.partition=dirichlet", "data.alpha=0.2", FLOAT, "model.name=mlp"),
    "example level": (*EXAMPLE, FLOAT),
    "example level, unequal": (*EXAMPLE, "data.partition=dirichlet", "data.alpha=0.3", FLOAT),
    "example level, declared": (*EXAMPLE, "data.partition=dirichlet", "data.alpha=0.03", "data.public_num_examples=20"),
    "example target": ("privacy.example.enabled=true", "privacy.example.target_epsilon=6", FLOAT),
    "example budget": (*EXAMPLE, "privacy.example.max_epsilon=3", FLOAT, "rounds=3"),
    "local gaussian": (*LOCAL, "privacy.local.kind=gaussian"),
    "local laplace": (*LOCAL, "privacy.local.kind=laplace"),
    "local and example": (*LOCAL, "privacy.local.kind=gaussian", *EXAMPLE),
    "local budget": (*LOCAL, "privacy.local.kind=gaussian", "privacy.local.max_epsilon=9", "rounds=3"),
    "cnn": ("model.name=cnn", FLOAT),
    "everyone": ("sampling.kind=everyone", FLOAT),
}


def run(folder: Path, engine: str, *words: str) -> RunFolder:
    simulate(load_config([*SMALL, *words, f"engine={engine}", f"output_dir={folder / engine}"]))
    return RunFolder(folder / engine)


def charges(folder: RunFolder) -> list[tuple[object, ...]]:
    path = folder.path / "clients.db"
    if not path.exists():
        return []
    ledger = DurableLedger(path)
    assert ledger.verify() == []
    return sorted((row.round, row.guarantee, row.holder, row.event, row.count) for row in ledger.releases())


@pytest.mark.parametrize("name", RUNS)
def test_both_engines_give_one_run(name: str, tmp_path: Path) -> None:
    alone, together = (run(tmp_path, engine, *RUNS[name]) for engine in ("one_by_one", "batched"))
    assert charges(together) == charges(alone)
    one, other = alone.load_checkpoint(), together.load_checkpoint()
    assert one is not None
    assert other is not None
    torch.testing.assert_close(other.params, one.params, rtol=1e-3, atol=2e-5)
    for before, after in zip(alone.read_metrics(), together.read_metrics(), strict=True):
        known = [name for name in before if name != "seconds" and before[name] is not None]
        assert [after[name] for name in known] == pytest.approx([before[name] for name in known], rel=1e-4)


def test_budgets_refuse_the_same_clients(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = []
    for engine in ("one_by_one", "batched"):
        caplog.clear()
        run(tmp_path, engine, *RUNS["example budget"])
        said.append({record.message for record in caplog.records if "refused" in record.message})
    assert any("example-level budget is spent" in line for line in said[0])
    assert said[0] == said[1]


def test_a_client_with_too_many_examples_for_delta_refuses_in_both(tmp_path: Path) -> None:
    words = (*EXAMPLE, "privacy.user.enabled=false", "privacy.delta=0.03")
    rows = [run(tmp_path, engine, *words).read_metrics() for engine in ("one_by_one", "batched")]
    assert [row["replies"] for row in rows[1]] == [row["replies"] for row in rows[0]]
    assert {row["replies"] for row in rows[0]} == {0.0}


def test_what_is_not_batched_is_trained_one_by_one_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "discreet"):
        run(tmp_path, "auto", *LOCAL, "privacy.local.kind=laplace_step")
    assert sum("laplace_step is not batched" in record.message for record in caplog.records) == 1


def test_a_model_with_a_layer_of_its_own_is_trained_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(MODELS, "logistic_regression", _normed)
    nodes.model_of.cache_clear()
    with caplog.at_level("INFO", "discreet"):
        run(tmp_path, "auto", FLOAT)
    nodes.model_of.cache_clear()
    assert sum("model.name=logistic_regression is not batched" in record.message for record in caplog.records) == 1


def _normed(shape: tuple[int, ...], classes: int) -> nn.Module:
    size = math.prod(shape)
    return nn.Sequential(nn.Flatten(), nn.LayerNorm(size), nn.Linear(size, classes))


def test_asking_for_what_is_not_batched_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine=batched does not cover privacy\.local\.kind=laplace_step"):
        run(tmp_path, "batched", *LOCAL, "privacy.local.kind=laplace_step")


@dataclass(frozen=True)
class Alike:
    """Clients who all hold the same 30 examples."""

    def __len__(self) -> int:
        return 40

    def sizes(self, clients: Numbers) -> Numbers:
        return np.full(len(clients), 30)

    def examples(self, client: int) -> Numbers:
        return np.arange(30)


def test_without_a_seed_no_chunk_repeats_the_draws_of_another() -> None:
    """What tells these clients apart is the order of their examples: two of 40 are alike once in 10^20 runs."""
    found: list[PartialReply] = []
    start = Clients("logistic_regression", (4,), (30, 3)).start
    for _ in range(2):
        with exchange(1, 1, "seed=null", client_examples=Alike()) as asked:
            how = {"round_number": 2, "params": start, "clip_norm": 0.1}
            found += [kept(part) for part in asked.ask(**how, cohort=range(20))]
    assert len({tuple(each.values.tolist()) for each in found}) == 40


def exchange(chunk: int, workers: int, *words: str, client_examples: ClientExamples | None = None) -> BatchedTransport:
    some = Clients("logistic_regression", (4,), (30, 3))
    client_examples = client_examples or SampledExamples(10**6, len(some.data), 5, seed=31)
    config = load_config([*SMALL, "seed=7", "training.batch_size=2", FLOAT, "privacy.user.noise_multiplier=1", *words])
    return BatchedTransport(config, Engine(some.shared, client_examples, some.layers, chunk, workers), accounts=None)


def replies(chunk: int, workers: int, cohort: list[int], *, clip_norm: float = 0.1) -> list[PartialReply]:
    start = Clients("logistic_regression", (4,), (30, 3)).start
    with exchange(chunk, workers) as asked:
        return [kept(part) for part in asked.ask(round_number=2, params=start, clip_norm=clip_norm, cohort=cohort)]


def sum_of(parts: list[PartialReply]) -> PartialReply:
    total = CohortSum(len(parts[0].values), 0.1, None)
    for part in parts:
        total.take(part)
    return total.part()


def kept(part: PartialReply | Failure) -> PartialReply:
    """A copy: the sum is overwritten by what comes next."""
    assert isinstance(part, PartialReply)
    return replace(part, values=part.values.clone())


@pytest.mark.parametrize(("chunk", "workers"), [(1, 1), (3, 2), (100, 2)])
def test_how_a_cohort_is_cut_does_not_change_what_it_replies(chunk: int, workers: int) -> None:
    cohort = [999_999, 0, 17, 333_333, 5, 6, 7]
    one, other = replies(chunk, workers, cohort), replies(4, 1, cohort)
    sums = [sum_of(parts) for parts in (one, other)]
    torch.testing.assert_close(sums[0].values, sums[1].values, rtol=1e-4, atol=1e-6)
    assert (sums[0].below, sums[0].replies) == (sums[1].below, sums[1].replies)


def test_the_bit_says_whether_the_norm_is_at_most_the_clip_norm() -> None:
    cohort = list(range(40))
    norms = [float(each.values.norm()) for each in replies(1, 1, cohort, clip_norm=math.inf)]
    clip_norm = sorted(norms)[20] * 1.0001
    for norm, clipped in zip(norms, replies(1, 1, cohort, clip_norm=clip_norm), strict=True):
        assert float(clipped.values.norm()) == pytest.approx(min(norm, clip_norm), rel=1e-5)
        assert clipped.below == (1 if norm <= clip_norm else -1)


def test_no_more_than_a_few_chunks_are_trained_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    admitted: list[int] = []

    def watched(request: TrainRequest, sizes: dict[str, int], **how: Any) -> dict[str, Admitted | Refused]:
        admitted.extend(map(int, sizes))
        return admit(request, sizes, **how)

    monkeypatch.setattr("discreet.simulation.cohort.admit", watched)
    start = Clients("logistic_regression", (4,), (30, 3)).start
    with exchange(2, 2) as asked:
        next(iter(asked.ask(round_number=1, params=start, clip_norm=0.1, cohort=range(1000))))
    assert 2 <= len(admitted) <= 10  # 5 chunks of 2
