"""The audit of private evaluation: right code is not refuted, and half the noise is found. Seeds are fixed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from discreet.audit.answer_audit import audit_answers, audit_statistics
from discreet.audit.gaussian_fit import epsilon_of_shift
from discreet.audit.verdict import judge
from discreet.settings.rules import ConfigError
from discreet.settings.settings import Settings
from tests.audit.made import halve_the_noise
from tests.node.clients import config

ENOUGH = 1000


def settings(*words: str) -> Settings:
    rated = ("evaluation.kind=private", "evaluation.noise_multiplier=1", "privacy.user.target_epsilon=null")
    return config(
        *rated, "privacy.user.noise_multiplier=1", "sampling.kind=everyone", "data.num_clients=20", "seed=7937", *words
    )


@pytest.mark.parametrize("noise", ["float", "grid"])
def test_private_evaluation_is_not_refuted_and_shows_most_of_what_it_costs(noise: str) -> None:
    (run,) = judge(audit_answers(settings(f"privacy.noise={noise}"), releases=ENOUGH)).judgements
    assert run.refuted_by == ()
    assert run.estimate == pytest.approx(run.claim.epsilon, rel=0.15)  # 3.139 +- 0.15 by 1000 releases each way


def test_half_the_noise_of_private_evaluation_is_found_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    halve_the_noise(monkeypatch)
    assert judge(audit_answers(settings(), releases=ENOUGH)).refuted


def test_a_sampled_cohort_of_raters_is_not_refuted() -> None:
    words = ("sampling.kind=poisson", "sampling.probability=0.3")
    assert not judge(audit_answers(settings(*words), releases=ENOUGH)).refuted


JOINED = ("evaluation.cohort=same", "model.name=linear", "privacy.user.too_noisy=warn")


@pytest.mark.parametrize("clip", ["adaptive", "fixed"])
def test_a_round_that_also_rates_shows_update_bit_and_answer_and_no_more_than_they_cost_together(clip: str) -> None:
    (run,) = judge(audit_answers(settings(*JOINED, f"privacy.user.clip.kind={clip}"), releases=ENOUGH)).judgements
    # Two Gaussians of multiplier 1 about one client are one of 1 / sqrt(2).
    assert run.claim.epsilon == pytest.approx(epsilon_of_shift(2**0.5, delta=1e-3), abs=1e-3)
    assert run.refuted_by == ()
    assert run.estimate == pytest.approx(run.claim.epsilon, rel=0.15)


def test_half_the_noise_of_a_joined_round_is_found_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    halve_the_noise(monkeypatch)
    assert judge(audit_answers(settings(*JOINED), releases=400)).refuted


def test_answers_that_are_charged_as_if_the_update_came_for_nothing_are_found_from_outside() -> None:
    joined, alone = audit_answers(settings(*JOINED), releases=400), audit_answers(settings(), releases=2)
    (seen,), (rated,) = joined.observations, alone.observations
    assert judge(replace(joined, observations=(replace(seen, claim=rated.claim),))).refuted


def test_a_joined_round_of_a_sampled_cohort_is_not_refuted() -> None:
    words = ("sampling.kind=poisson", "sampling.probability=0.3")
    assert not judge(audit_answers(settings(*JOINED, *words), releases=400)).refuted


@pytest.mark.parametrize("noise", ["float", "grid"])
@pytest.mark.parametrize("of", ["moments", "quantiles,examples"])
def test_statistics_are_not_refuted_and_show_most_of_what_they_cost(noise: str, of: str) -> None:
    asked = (f"statistics.of=[{of}]", "statistics.noise_multiplier=1", f"privacy.noise={noise}")
    (run,) = judge(audit_statistics(settings(*asked), releases=ENOUGH)).judgements
    assert run.refuted_by == ()
    assert run.claim.epsilon == pytest.approx(3.139, abs=1e-3)  # of z = 1: REFERENCES of the paper
    assert run.estimate == pytest.approx(run.claim.epsilon, rel=0.15)


def test_half_the_noise_of_statistics_is_found_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    halve_the_noise(monkeypatch)
    assert judge(audit_statistics(settings("statistics.noise_multiplier=1"), releases=ENOUGH)).refuted


def test_statistics_that_nothing_pays_for_are_refused() -> None:
    with pytest.raises(ConfigError, match="an audit of statistics needs"):
        audit_statistics(settings("evaluation.kind=public", "privacy.user.enabled=false"), releases=ENOUGH)


def test_without_private_evaluation_there_is_nothing_to_audit() -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.kind must be private"):
        audit_answers(settings("evaluation.kind=public"), releases=ENOUGH)


def test_one_release_is_not_enough() -> None:
    with pytest.raises(ConfigError, match="at least two releases"):
        audit_answers(settings(), releases=1)
