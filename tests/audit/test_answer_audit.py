"""The audit of private evaluation: right code is not refuted, and half the noise is found. Seeds are fixed."""

from __future__ import annotations

import pytest

from discreet.audit.answer_audit import AnswerAudit, audit_answers
from discreet.audit.verdict import judge
from discreet.config import ConfigError, RunConfig
from tests.audit.halved import halve_the_noise
from tests.client.clients import config

ENOUGH = AnswerAudit(1000)


def settings(*words: str) -> RunConfig:
    rated = ("evaluation.kind=private", "evaluation.noise_multiplier=1", "privacy.user.target_epsilon=null")
    return config(
        *rated, "privacy.user.noise_multiplier=1", "sampling.kind=everyone", "data.num_clients=20", "seed=7937", *words
    )


@pytest.mark.parametrize("noise", ["float", "grid"])
def test_private_evaluation_is_not_refuted_and_shows_most_of_what_it_costs(noise: str) -> None:
    (run,) = judge(audit_answers(settings(f"privacy.noise={noise}"), ENOUGH)).judgements
    assert run.refuted_by == ()
    assert run.estimate == pytest.approx(run.claimed, rel=0.15)  # 3.139 +- 0.15 by 1000 releases each way


def test_half_the_noise_of_private_evaluation_is_found_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    halve_the_noise(monkeypatch)
    assert judge(audit_answers(settings(), ENOUGH)).refuted


def test_a_sampled_cohort_of_raters_is_not_refuted() -> None:
    words = ("sampling.kind=poisson", "sampling.probability=0.3")
    assert not judge(audit_answers(settings(*words), ENOUGH)).refuted


def test_without_private_evaluation_there_is_nothing_to_audit() -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.kind must be private"):
        audit_answers(settings("evaluation.kind=public"), ENOUGH)


def test_one_release_is_not_enough() -> None:
    with pytest.raises(ConfigError, match="at least two releases of the answers"):
        audit_answers(settings(), AnswerAudit(1))
