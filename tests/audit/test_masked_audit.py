"""The audits of masked sums: right code is not refuted, and planted faults are found from outside. Seeds are fixed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from discreet.audit.gaussian_fit import epsilon_of_shift
from discreet.audit.release_audit import MakeVector, audit_round, audit_shared_step, step_parts
from discreet.audit.verdict import Judgement, judge
from discreet.data.examples import Task
from discreet.mechanisms.masked_sums import step_norm
from discreet.node.client import Values, noised_vector
from discreet.privacy.randomness import RandomSource
from discreet.privacy.secure_grid import SecureSum
from discreet.protocol.messages import TrainRequest
from discreet.server.plan import Plan
from discreet.server.session import resolve
from tests.node.clients import config

BOTH = ("privacy.accountant=rdp", "sampling.kind=everyone", "data.num_clients=6", "model.name=linear")
MASKED = (
    *("privacy.user.aggregation=secure", "privacy.user.too_noisy=warn", "privacy.user.target_epsilon=null"),
    *("privacy.user.noise_multiplier=1", "seed=7949"),
)
RATED = ("evaluation.kind=private", "evaluation.noise_multiplier=1")
JOINED = (*RATED, "evaluation.cohort=same")
SHARED = (
    *("privacy.user.enabled=false", "privacy.user.target_epsilon=null", "seed=7951", "privacy.example.enabled=true"),
    *("privacy.example.aggregation=secure", "privacy.example.noise_multiplier=1", "privacy.example.clip_norm=0.5"),
    *("training.epochs=1", "training.batch_size=300", "rounds=3"),
)
SPARE = ("privacy.secure.dropouts=2", "privacy.secure.colluding=2", "data.num_clients=7")


def users(*words: str) -> Plan:
    return resolve(config(*BOTH, *MASKED, *words))[0]


def steps(*words: str) -> tuple[Plan, Task]:
    return resolve(config(*BOTH, *SHARED, *words))


def not_refuted_and_near(run: Judgement, epsilon: float) -> bool:
    """The claim is by RDP, and larger than the epsilon of the noise."""
    estimate, near = run.estimate, pytest.approx(epsilon, rel=0.3)
    return run.refuted_by == () and estimate == near and run.claimed > epsilon


CLIPS = pytest.mark.parametrize("clip", ["adaptive", "fixed"])


@CLIPS
def test_a_masked_sum_is_not_refuted_and_shows_what_its_noise_allows(clip: str) -> None:
    (run,) = judge(audit_round(users(f"privacy.user.clip.kind={clip}"), releases=400)).observations
    assert not_refuted_and_near(run, epsilon_of_shift(1.0, delta=1e-3))


@CLIPS
def test_a_masked_sum_that_also_rates_shows_update_bit_and_answer_and_no_more_than_they_cost_together(
    clip: str,
) -> None:
    joined = audit_round(users(*JOINED, f"privacy.user.clip.kind={clip}"), releases=400)
    # Two Gaussians of multiplier 1 about one client are one of 1 / sqrt(2).
    assert not_refuted_and_near(judge(joined).observations[0], epsilon_of_shift(2**0.5, delta=1e-3))
    (seen,), (alone,) = joined.observations, audit_round(users(), releases=2).observations
    assert judge(replace(joined, observations=(replace(seen, claim=alone.claim),))).refuted


def test_a_masked_sum_of_ratings_alone_is_not_refuted_and_costs_what_its_noise_says() -> None:
    experiment = audit_round(users(*RATED), releases=400, of_answers=True)
    assert not_refuted_and_near(judge(experiment).observations[0], epsilon_of_shift(1.0, delta=1e-3))
    (with_ratings,), (without,) = (audit_round(users(*words), releases=2).observations for words in (RATED, ()))
    assert with_ratings.claim.epsilon == pytest.approx(without.claim.epsilon, rel=1e-3)


def for_all_nodes(vector: SecureSum, values: Values, request: TrainRequest, source: RandomSource) -> Tensor:
    """The noise is enough if all n clients survive, and honest: not if h do."""
    less = replace(vector, variance=vector.variance * vector.summands // vector.nodes)
    return noised_vector(less, values, request, source)


def for_another_clip(vector: SecureSum, values: Values, request: TrainRequest, source: RandomSource) -> Tensor:
    """Noise for a clip norm that is half of the one that clipped."""
    return noised_vector(replace(vector, variance=vector.variance // 4), values, request, source)


def one_adds_none(vector: SecureSum, values: Values, request: TrainRequest, source: RandomSource) -> Tensor:
    """A node that adds no noise: told by what it is asked, for the others of this audit send noise alone."""
    noised = noised_vector(vector, values, request, source)
    return noised - vector.noise(source.child("secure", "update")) if request.work.trains else noised


def answers_twice(vector: SecureSum, values: Values, request: TrainRequest, source: RandomSource) -> Tensor:
    """An answer that is twice as long as may be."""
    more = 0 if values.answer is None else vector.encode(None, 1.0, answer=values.answer)
    return noised_vector(vector, values, request, source) + more


def without_a_clip(vector: SecureSum, values: Values, request: TrainRequest, source: RandomSource) -> Tensor:
    """An update that is twice as long as the clip norm."""
    twice = vector.encode(values.update, request.clip_norm) if request.work.trains else 0
    return noised_vector(vector, values, request, source) + twice


@pytest.mark.parametrize(
    ("fault", "words", "of_answers"),
    [
        (for_all_nodes, SPARE, False),
        (for_another_clip, (), False),
        (without_a_clip, (), False),
        (one_adds_none, ("data.num_clients=4",), False),
        (answers_twice, JOINED, False),
        (for_another_clip, RATED, True),
    ],
)
def test_a_planted_fault_of_masked_sums_is_found_from_outside(
    fault: MakeVector, words: tuple[str, ...], of_answers: bool
) -> None:
    assert judge(audit_round(users(*words), releases=500, of_answers=of_answers, make=fault)).refuted


def test_a_shared_step_is_not_refuted_and_shows_what_its_noise_allows() -> None:
    (run,) = judge(audit_shared_step(*steps("server.optimizer=adam"), releases=300)).observations
    assert not_refuted_and_near(run, epsilon_of_shift(1.0, delta=1e-3))
    assert run.adjacency == "add or remove one example"


def data_owner_adds_none(vector: SecureSum, values: Values, request: TrainRequest, source: RandomSource) -> Tensor:
    """One node more is lost than is borne: the one that holds the examples adds none."""
    noised = noised_vector(vector, values, request, source)
    return noised - vector.noise(source.child("secure", "step")) if values.update.any() else noised


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (for_all_nodes, SPARE),
        (for_another_clip, ()),
        (data_owner_adds_none, ("data.num_clients=4", "training.batch_size=400")),
    ],
)
def test_noise_that_is_missing_from_a_shared_step_is_found_from_outside(
    fault: MakeVector, words: tuple[str, ...]
) -> None:
    assert judge(audit_shared_step(*steps(*words), releases=500, make=fault)).refuted


def test_the_canary_moves_its_clients_sum_by_all_that_it_may() -> None:
    plan, task = steps()
    _, _, without, within = step_parts(plan, task)
    moved = float(torch.linalg.vector_norm(within.update - without.update))
    assert moved == pytest.approx(step_norm(plan.run), rel=1e-5)
