"""Audits that repeat a release: right code is not refuted, and what weakens it is found. Seeds are
fixed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from discreet.audit import release_audit
from discreet.audit.canaries import Experiment
from discreet.audit.estimates import epsilon_of_shift
from discreet.audit.experiments import experiment_of
from discreet.audit.release_audit import audit_local, audit_round, audit_shared_step, step_parts
from discreet.audit.user_audit import AuditRequest
from discreet.audit.verdict import Judgement, judge
from discreet.data.examples import Task
from discreet.mechanisms.masked_sums import step_norm
from discreet.node.client import ExactReply, noised_vector
from discreet.planning.plan import Plan, planned
from discreet.privacy import clipping
from discreet.privacy.randomness import RandomSource
from discreet.privacy.secure_grid import SecureSum
from discreet.protocol.messages import TrainRequest
from discreet.server.resolve import resolve
from discreet.settings.rules import ConfigError
from discreet.settings.settings import Settings
from tests.audit.made import halve_the_noise
from tests.node.clients import config

BOTH = (
    "privacy.accountant=rdp",
    "sampling.kind=everyone",
    "data.num_clients=4",
    "model.name=linear",
)
MASKED = (
    "privacy.user.aggregation=secure",
    "privacy.user.too_noisy=warn",
    "privacy.user.target_epsilon=null",
    "privacy.user.noise_multiplier=1",
    "seed=7949",
)
RATED = ("evaluation.kind=private", "evaluation.noise_multiplier=1")
JOINED = (*RATED, "evaluation.cohort=same")
SHARED = (
    "privacy.user.enabled=false",
    "privacy.user.target_epsilon=null",
    "seed=7951",
    "privacy.example.enabled=true",
    "privacy.example.aggregation=secure",
    "privacy.example.noise_multiplier=1",
    "privacy.example.clip_norm=0.5",
    "training.epochs=1",
    "training.batch_size=300",
    "rounds=3",
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


# The default tier keeps one release of each kind, and one planted fault of each audit: the others
# repeat the same audit and run in the tier `processes`.
LATER = pytest.mark.processes
CLIPS = pytest.mark.parametrize("clip", ["adaptive", pytest.param("fixed", marks=LATER)])


@CLIPS
def test_a_masked_sum_is_not_refuted_and_shows_what_its_noise_allows(clip: str) -> None:
    (run,) = judge(audit_round(users(f"privacy.user.clip.kind={clip}"), releases=400)).observations
    assert not_refuted_and_near(run, epsilon_of_shift(1.0, delta=1e-3))


@CLIPS
def test_a_masked_sum_that_also_rates_shows_no_more_than_its_parts_cost_together(
    clip: str,
) -> None:
    joined = audit_round(users(*JOINED, f"privacy.user.clip.kind={clip}"), releases=400)
    # Two Gaussians of multiplier 1 about one client are one of 1 / sqrt(2).
    assert not_refuted_and_near(judge(joined).observations[0], epsilon_of_shift(2**0.5, delta=1e-3))
    (seen,), (alone,) = joined.observations, audit_round(users(), releases=2).observations
    assert judge(replace(joined, observations=(replace(seen, claim=alone.claim),))).refuted


def test_a_masked_sum_of_ratings_alone_is_not_refuted_and_costs_what_its_noise_says() -> None:
    experiment = audit_round(users(*RATED), releases=400, of_answers=True)
    assert not_refuted_and_near(
        judge(experiment).observations[0], epsilon_of_shift(1.0, delta=1e-3)
    )
    (with_ratings,), (without,) = (
        audit_round(users(*words), releases=2).observations for words in (RATED, ())
    )
    assert with_ratings.claim.epsilon == pytest.approx(without.claim.epsilon, rel=1e-3)


def for_all_nodes(
    vector: SecureSum, values: ExactReply, request: TrainRequest, source: RandomSource
) -> Tensor:
    """The noise is enough if all n clients survive, and honest: not if h do."""
    less = replace(vector, variance=vector.variance * vector.summands // vector.nodes)
    return noised_vector(less, values, request, source)


def for_another_clip(
    vector: SecureSum, values: ExactReply, request: TrainRequest, source: RandomSource
) -> Tensor:
    """Noise for a clip norm that is half of the one that clipped."""
    return noised_vector(replace(vector, variance=vector.variance // 4), values, request, source)


def one_adds_none(
    vector: SecureSum, values: ExactReply, request: TrainRequest, source: RandomSource
) -> Tensor:
    """A node that adds no noise: told by what it is asked, for the others of this audit send noise
    alone."""
    noised = noised_vector(vector, values, request, source)
    return (
        noised - vector.noise(source.child("secure", "update")) if request.work.trains else noised
    )


def answers_twice(
    vector: SecureSum, values: ExactReply, request: TrainRequest, source: RandomSource
) -> Tensor:
    """An answer that is twice as long as may be."""
    more = 0 if values.answer is None else vector.encode(None, 1.0, answer=values.answer)
    return noised_vector(vector, values, request, source) + more


def without_a_clip(
    vector: SecureSum, values: ExactReply, request: TrainRequest, source: RandomSource
) -> Tensor:
    """An update that is twice as long as the clip norm."""
    twice = vector.encode(values.update, request.clip_norm) if request.work.trains else 0
    return noised_vector(vector, values, request, source) + twice


@pytest.mark.parametrize(
    ("fault", "words", "of_answers"),
    [
        pytest.param(for_all_nodes, SPARE, False, marks=LATER),
        (for_another_clip, (), False),
        pytest.param(without_a_clip, (), False, marks=LATER),
        pytest.param(one_adds_none, (), False, marks=LATER),
        pytest.param(answers_twice, JOINED, False, marks=LATER),
        (for_another_clip, RATED, True),
    ],
)
def test_a_planted_fault_of_masked_sums_is_found_from_outside(
    monkeypatch: pytest.MonkeyPatch, fault: object, words: tuple[str, ...], of_answers: bool
) -> None:
    monkeypatch.setattr(release_audit, "noised_vector", fault)
    assert judge(audit_round(users(*words), releases=350, of_answers=of_answers)).refuted


def test_a_shared_step_is_not_refuted_and_shows_what_its_noise_allows() -> None:
    (run,) = judge(audit_shared_step(*steps("server.optimizer=adam"), releases=300)).observations
    assert not_refuted_and_near(run, epsilon_of_shift(1.0, delta=1e-3))
    assert run.adjacency == "add or remove one example"


def data_owner_adds_none(
    vector: SecureSum, values: ExactReply, request: TrainRequest, source: RandomSource
) -> Tensor:
    """One node more is lost than is borne: the one that holds the examples adds none."""
    noised = noised_vector(vector, values, request, source)
    return noised - vector.noise(source.child("secure", "step")) if values.update.any() else noised


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param(for_all_nodes, SPARE, marks=LATER),
        (for_another_clip, ()),
        pytest.param(data_owner_adds_none, ("training.batch_size=400",), marks=LATER),
    ],
)
def test_noise_that_is_missing_from_a_shared_step_is_found_from_outside(
    monkeypatch: pytest.MonkeyPatch, fault: object, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr(release_audit, "noised_vector", fault)
    assert judge(audit_shared_step(*steps(*words), releases=400)).refuted


def test_the_canary_moves_its_clients_sum_by_all_that_it_may() -> None:
    plan, task = steps()
    _, _, without, within = step_parts(plan, task)
    moved = float(torch.linalg.vector_norm(within.update - without.update))
    assert moved == pytest.approx(step_norm(plan.run), rel=1e-5)


MANY = 1000
# Enough for faults that show several times what is claimed: of three other seeds each finds them.
SOME = 400


def rated(*words: str) -> Settings:
    on = (
        "evaluation.kind=private",
        "evaluation.noise_multiplier=1",
        "privacy.user.target_epsilon=null",
    )
    noise = (
        "privacy.user.noise_multiplier=1",
        "privacy.user.too_noisy=warn",
        "seed=7937",
        "model.name=linear",
    )
    return config(*on, *noise, "sampling.kind=everyone", "data.num_clients=20", *words)


def ratings(releases: int, *words: str) -> Experiment:
    return experiment_of(rated(*words), AuditRequest("evaluation", canaries=releases))


def statistics(releases: int, *words: str) -> Experiment:
    return experiment_of(rated(*words), AuditRequest("statistics", canaries=releases))


SAME_COHORT = ("evaluation.cohort=same",)
OWN_OR_SAME_COHORT = pytest.mark.parametrize(
    "words", [(), pytest.param(SAME_COHORT, marks=LATER)], ids=["own", "joined"]
)


# Two Gaussians of multiplier 1 about one client are one of 1 / sqrt(2).
@pytest.mark.parametrize(
    ("words", "noise_multiplier"),
    [(("privacy.noise=grid",), 1.0), pytest.param(SAME_COHORT, 2**-0.5, marks=LATER)],
)
def test_a_rating_is_not_refuted_and_shows_most_of_what_it_costs(
    words: tuple[str, ...], noise_multiplier: float
) -> None:
    (run,) = judge(ratings(MANY, *words)).observations
    assert run.claimed == pytest.approx(
        epsilon_of_shift(1 / noise_multiplier, delta=1e-3), abs=1e-3
    )
    assert run.refuted_by == ()
    # 3.139 +- 0.15 by 1000 releases each way
    assert run.estimate == pytest.approx(run.claimed, rel=0.15)


@OWN_OR_SAME_COHORT
def test_half_the_noise_of_ratings_is_found_from_outside(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    halve_the_noise(monkeypatch)
    assert judge(ratings(SOME, *words)).refuted


@pytest.mark.parametrize(
    ("noise", "of"),
    [("float", "moments"), pytest.param("grid", "quantiles,examples", marks=LATER)],
)
def test_statistics_are_not_refuted_and_show_most_of_what_they_cost(noise: str, of: str) -> None:
    asked = (f"statistics.of=[{of}]", "statistics.noise_multiplier=1", f"privacy.noise={noise}")
    (run,) = judge(statistics(MANY, *asked)).observations
    assert run.refuted_by == ()
    assert run.claimed == pytest.approx(3.139, abs=1e-3)  # of z = 1: REFERENCES of the paper
    assert run.estimate == pytest.approx(run.claimed, rel=0.15)


def test_half_the_noise_of_statistics_is_found_from_outside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    halve_the_noise(monkeypatch)
    assert judge(statistics(SOME, "statistics.noise_multiplier=1")).refuted


@pytest.mark.parametrize("cohort", ["own", "same"])
def test_ratings_of_a_run_that_would_not_begin_are_not_audited(cohort: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="will not learn"):
        ratings(
            2,
            f"evaluation.cohort={cohort}",
            "privacy.user.too_noisy=refuse",
            "rounds=90",
            "model.name=mlp",
        )
    account = (
        f"privacy.user.account={tmp_path / 'people.db'}",
        "sampling.population_name=people",
        "seed=null",
    )
    with pytest.raises(ConfigError, match=r"people\.db is missing"):
        ratings(2, f"evaluation.cohort={cohort}", *account)


KINDS = pytest.mark.parametrize(
    "kind",
    ["gaussian", *(pytest.param(kind, marks=LATER) for kind in ("laplace", "laplace_step"))],
)


def local(kind: str, *words: str) -> Plan:
    noise = f"privacy.local.noise_multiplier={1 if kind == 'gaussian' else 0.5}"
    on = (
        "privacy.user.enabled=false",
        f"privacy.local.kind={kind}",
        noise,
        "seed=7933",
        "rounds=3",
    )
    return planned(config(*on, "training.epochs=1", "privacy.noise=float", *words))


@pytest.mark.parametrize(
    ("kind", "noise"),
    [
        ("gaussian", "grid"),
        pytest.param("laplace", "grid", marks=LATER),
        pytest.param("laplace_step", "float", marks=LATER),
    ],
)
def test_a_local_release_is_not_refuted_and_shows_most_of_what_it_costs(
    kind: str, noise: str
) -> None:
    verdict = judge(audit_local(local(kind, f"privacy.noise={noise}"), releases=MANY))
    run = verdict.observations[-1]
    assert not verdict.refuted
    assert max(bound["epsilon"] for bound in run.bounds.values()) > 0.65 * run.claimed


@KINDS
def test_half_the_noise_of_a_local_release_is_found_from_outside(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    halve_the_noise(monkeypatch)
    releases = SOME if kind == "gaussian" else MANY
    assert judge(audit_local(local(kind), releases=releases)).refuted


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_an_update_that_is_not_clipped_is_found_from_outside(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(
        clipping, "clip_by_norm", lambda rows, clip_norm, *, order: (rows / 100, None)
    )
    assert judge(audit_local(local(kind), releases=SOME)).refuted


def test_rounds_are_claimed_with_the_noise_of_each_and_add_up() -> None:
    words = (
        "privacy.local.noise_multiplier=null",
        "privacy.local.epsilon=6",
        "privacy.local.schedule=[1,2,3]",
    )
    found = audit_local(local("laplace", *words), releases=200, rounds=3)
    assert [round(seen.claim.epsilon) for seen in found.observations] == [1, 2, 3, 6]
    run = found.observations[-1].scores
    assert run.seen.sum() == pytest.approx(
        sum(seen.scores.seen.sum() for seen in found.observations[:-1])
    )
