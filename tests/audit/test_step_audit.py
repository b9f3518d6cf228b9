"""The audit of a step that clients share: right code is not refuted, and planted faults are found. Seeds are fixed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from discreet.audit.gaussian_tradeoff import epsilon_of_shift
from discreet.audit.masked_sums import MakeVector
from discreet.audit.step_audit import SharedStep, StepAudit, audit_shared_step
from discreet.audit.verdict import judge
from discreet.client.noised_vector import Values, noised_vector
from discreet.config import ConfigError, RunConfig
from discreet.federated.messages import TrainRequest
from discreet.federated.run_plan import round_settings
from discreet.federated.session import checked, sizes_of
from discreet.privacy.per_example import sum_one_by_one
from discreet.privacy.randomness import RandomSource
from discreet.privacy.secure_grid import SecureSum
from discreet.tasks.examples import Examples
from discreet.training.shared_step import shared_step
from tests.client.clients import config

ENOUGH = StepAudit(300)
SHARED = (
    *("privacy.user.enabled=false", "privacy.user.target_epsilon=null", "privacy.accountant=rdp", "seed=7951"),
    *("privacy.example.enabled=true", "privacy.example.aggregation=secure", "privacy.example.noise_multiplier=1"),
    *("privacy.example.l2_norm_clip=0.5", "sampling.kind=everyone", "data.num_clients=6", "model.name=linear"),
    *("training.epochs=1", "training.batch_size=300", "rounds=3"),
)


def settings(*words: str) -> RunConfig:
    return config(*SHARED, *words)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_shared_step_is_not_refuted_and_shows_what_its_noise_allows(optimizer: str) -> None:
    (run,) = judge(audit_shared_step(settings(f"server.optimizer={optimizer}"), ENOUGH)).judgements
    assert run.refuted_by == ()
    assert run.estimate == pytest.approx(epsilon_of_shift(1.0, delta=1e-3), rel=0.3)
    assert run.claimed > 3.139  # by RDP, and with what rounding may add
    assert run.adjacency == "add or remove one example"


def of_all_nodes(vector: SecureSum, values: Values, request: TrainRequest, source: RandomSource) -> Tensor:
    """The noise is enough if all n clients survive, and honest: not if h do."""
    less = replace(vector, variance=vector.variance * vector.summands // vector.nodes)
    return noised_vector(less, values, request, source)


def for_another_clip(vector: SecureSum, values: Values, request: TrainRequest, source: RandomSource) -> Tensor:
    return noised_vector(replace(vector, variance=vector.variance // 4), values, request, source)


def one_adds_none(vector: SecureSum, values: Values, request: TrainRequest, source: RandomSource) -> Tensor:
    """One node more is lost than is borne: the one that holds the examples adds none."""
    noised = noised_vector(vector, values, request, source)
    return noised - vector.noise(source.child("secure", "step")) if values.update.any() else noised


def nobody_adds_any(vector: SecureSum, values: Values, request: TrainRequest, source: RandomSource) -> Tensor:
    return noised_vector(replace(vector, variance=0), values, request, source)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (of_all_nodes, ("privacy.secure.dropouts=2", "privacy.secure.colluding=2", "data.num_clients=7")),
        (for_another_clip, ()),
        (one_adds_none, ("data.num_clients=4", "training.batch_size=400")),
    ],
)
def test_noise_that_is_missing_from_a_shared_step_is_found_from_outside(
    fault: MakeVector, words: tuple[str, ...]
) -> None:
    assert judge(audit_shared_step(settings(*words), StepAudit(300), make=fault)).refuted


def test_a_shared_step_without_noise_of_clients_is_found_by_what_assumes_nothing() -> None:
    experiment = audit_shared_step(settings(), StepAudit(600), make=nobody_adds_any)
    (run,) = judge(experiment).judgements
    assert run.refuted_by == ("any scores",)


def counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(model: nn.Module, params: Tensor, mine: Examples, **how: Any) -> Tensor:
        return shared_step(model, params, Examples(torch.cat([mine.inputs] * 2), torch.cat([mine.targets] * 2)), **how)

    monkeypatch.setattr("discreet.client.client.shared_step", twice)


def clipped_for_twice_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    def loose(model: nn.Module, inputs: Tensor, *, l2_norm_clip: float, **how: Any) -> Tensor:
        return sum_one_by_one(model, inputs, l2_norm_clip=2 * l2_norm_clip, **how)

    monkeypatch.setattr("discreet.training.shared_step.sum_one_by_one", loose)


@pytest.mark.parametrize("fault", [counted_twice, clipped_for_twice_the_norm])
def test_a_fault_of_a_clients_sum_is_found_from_outside(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    assert judge(audit_shared_step(settings(), StepAudit(300))).refuted


@pytest.mark.parametrize(
    "word", ["privacy.example.aggregation=plain", "privacy.example.noise_multiplier=0"], ids=["plain", "no noise"]
)
def test_what_is_no_shared_step_with_noise_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="an audit of a shared step needs"):
        audit_shared_step(settings(word), ENOUGH)


def test_a_client_with_more_examples_than_may_be_is_no_place_for_a_canary() -> None:
    with pytest.raises(ConfigError, match="this client has more examples than 16"):
        audit_shared_step(settings("training.batch_size=4"), ENOUGH)


def test_one_release_is_not_enough() -> None:
    with pytest.raises(ConfigError, match="at least two releases of a masked sum"):
        audit_shared_step(settings(), StepAudit(1))


def test_the_canary_moves_its_clients_sum_by_all_that_it_may() -> None:
    resolved, task = checked(settings())
    how = round_settings(resolved, sizes_of(resolved, task))
    assert how.norm is not None
    added = SharedStep.of(resolved, task, how, client=1).added
    assert float(torch.linalg.vector_norm(added)) == pytest.approx(how.norm, rel=1e-5)
