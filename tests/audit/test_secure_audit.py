"""The audit of masked sums: right code is not refuted, and planted faults are found from outside. Seeds are fixed."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from torch import Tensor

from discreet.audit.gaussian_tradeoff import epsilon_of_shift
from discreet.audit.masked_sums import MakeVector
from discreet.audit.secure_audit import SecureAudit, audit_secure
from discreet.audit.verdict import judge
from discreet.client.noised_vector import Values, noised_vector
from discreet.config import ConfigError, RunConfig
from discreet.federated.messages import TrainRequest
from discreet.privacy.randomness import RandomSource
from discreet.privacy.secure_grid import SecureSum
from tests.client.clients import config

ENOUGH = SecureAudit(400)
MASKED = (
    *("privacy.user.aggregation=secure", "privacy.accountant=rdp", "sampling.kind=everyone", "data.num_clients=6"),
    *("model.name=linear", "privacy.user.too_noisy=warn", "privacy.user.target_epsilon=null"),
    *("privacy.user.noise_multiplier=1", "seed=7949"),
)


def settings(*words: str) -> RunConfig:
    return config(*MASKED, *words)


@pytest.mark.parametrize("clip", ["adaptive", "fixed"])
def test_a_masked_sum_is_not_refuted_and_shows_what_its_noise_allows(clip: str) -> None:
    (run,) = judge(audit_secure(settings(f"privacy.user.clip.kind={clip}"), ENOUGH)).judgements
    assert run.refuted_by == ()
    assert run.estimate == pytest.approx(3.139, rel=0.3)  # exactly, of z = 1; the claim is by RDP, and larger
    assert run.claimed > 3.139


RATED = ("evaluation.kind=private", "evaluation.noise_multiplier=1")


@pytest.mark.parametrize("clip", ["adaptive", "fixed"])
def test_a_masked_sum_that_also_rates_shows_update_bit_and_answer_and_no_more_than_they_cost_together(
    clip: str,
) -> None:
    words = (*RATED, "evaluation.cohort=same", f"privacy.user.clip.kind={clip}")
    experiment = audit_secure(settings(*words), ENOUGH)
    (run,) = judge(experiment).judgements
    # Two Gaussians of multiplier 1 about one client are one of 1 / sqrt(2).
    together = epsilon_of_shift(2**0.5, delta=1e-3)
    assert experiment.mechanism == "a masked sum that also rates the model"
    assert run.refuted_by == ()
    assert run.estimate == pytest.approx(together, rel=0.25)
    assert run.claimed > together


def test_answers_of_a_masked_sum_that_are_charged_as_if_the_update_came_for_nothing_are_found() -> None:
    joined = audit_secure(settings(*RATED, "evaluation.cohort=same"), ENOUGH)
    (seen,), (alone,) = joined.observations, audit_secure(settings(), SecureAudit(2)).observations
    assert judge(replace(joined, observations=(replace(seen, claim=alone.claim),))).refuted


def test_a_masked_sum_of_ratings_alone_is_not_refuted_and_costs_what_its_noise_says() -> None:
    experiment = audit_secure(settings(*RATED), SecureAudit(400, of_answers=True))
    (run,) = judge(experiment).judgements
    assert experiment.mechanism == "a masked sum of ratings"
    assert run.refuted_by == ()
    assert run.estimate == pytest.approx(epsilon_of_shift(1.0, delta=1e-3), rel=0.3)


def test_of_a_cohort_of_its_own_the_round_itself_holds_no_answer() -> None:
    (with_ratings,), (without,) = (audit_secure(settings(*words), SecureAudit(2)).observations for words in (RATED, ()))
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
    ("fault", "words"),
    [
        (for_all_nodes, ("privacy.secure.dropouts=2", "privacy.secure.colluding=2", "data.num_clients=7")),
        (for_another_clip, ()),
        (without_a_clip, ()),
        (one_adds_none, ("data.num_clients=4",)),
        (for_another_clip, (*RATED, "evaluation.cohort=same")),
        (answers_twice, (*RATED, "evaluation.cohort=same")),
    ],
)
def test_a_planted_fault_of_masked_sums_is_found_from_outside(fault: MakeVector, words: tuple[str, ...]) -> None:
    assert judge(audit_secure(settings(*words), SecureAudit(500), make=fault)).refuted


@pytest.mark.parametrize("fault", [for_another_clip, answers_twice])
def test_a_planted_fault_of_masked_ratings_is_found_from_outside(fault: MakeVector) -> None:
    assert judge(audit_secure(settings(*RATED), SecureAudit(500, of_answers=True), make=fault)).refuted


def test_how_small_a_fault_can_be_found_is_said_first(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="discreet"):
        audit_secure(settings(), SecureAudit(100))
    assert "100 releases with the canary and as many without show epsilon" in caplog.text
    assert "they refute the claim if noise has" in caplog.text


def test_without_private_evaluation_there_is_no_masked_rating() -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.kind must be private"):
        audit_secure(settings(), SecureAudit(2, of_answers=True))


@pytest.mark.parametrize("words", [("privacy.user.aggregation=plain",), ("privacy.user.noise_multiplier=0",)])
def test_what_is_no_masked_sum_with_noise_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="an audit of masked sums needs"):
        audit_secure(settings(*words), ENOUGH)


def test_one_release_is_not_enough() -> None:
    with pytest.raises(ConfigError, match="at least two releases of a masked sum"):
        audit_secure(settings(), SecureAudit(1))
