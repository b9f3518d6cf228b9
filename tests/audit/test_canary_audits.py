"""Audits of runs with canaries: right code is not refuted, and what weakens it is found. Seeds are
fixed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from discreet.audit.canaries import Canaries, Experiment, draw_canaries
from discreet.audit.example_audit import audit_examples
from discreet.audit.experiments import experiment_of
from discreet.audit.user_audit import AuditRequest, CanaryTransport, audit_users
from discreet.audit.verdict import judge
from discreet.data.examples import Task
from discreet.planning.plan import Plan
from discreet.privacy import step_draws
from discreet.privacy.randomness import seeded_source
from discreet.protocol.messages import TrainRequest
from discreet.run_files.compose import load_config
from discreet.server.resolve import resolve
from discreet.settings.rules import ConfigError
from discreet.settings.settings import Settings, client_settings
from tests.audit.made import halve_the_noise
from tests.mechanisms.made import central
from tests.node.clients import config

# The default tier keeps one audit of each kind, and one that finds half the noise.
LATER = pytest.mark.processes
EVERYBODY = ("sampling.kind=everyone", "rounds=1", "privacy.user.noise_multiplier=1")


def plan(*words: str) -> tuple[Plan, Task]:
    quiet = (
        "privacy.user.too_noisy=warn",
        "model.name=linear",
        "data.num_clients=600",
        "seed=7919",
    )
    return resolve(load_config([*quiet, *words]))


def shift(experiment: Experiment) -> float:
    """How far apart the scores in and out are, in standard deviations."""
    scores = experiment.observations[-1].scores
    return float((scores.seen.mean() - scores.unseen.mean()) / scores.unseen.std())


@pytest.mark.parametrize(
    ("noise", "kind"),
    [
        ("grid", "adaptive"),
        pytest.param("float", "fixed", marks=LATER),
        pytest.param("secure_sum", "adaptive", marks=LATER),
    ],
)
def test_a_round_shows_all_that_its_event_says_and_no_more(noise: str, kind: str) -> None:
    run = plan(*EVERYBODY, f"privacy.noise={noise}", f"privacy.user.clip.kind={kind}")
    found = audit_users(*run, AuditRequest(canaries=500, honest=0, runs=2))
    # of z = 1: REFERENCES of the paper
    assert found.observations[-1].claim.epsilon == pytest.approx(3.139, abs=1e-3)
    # 1 / z; three standard errors of 1000 canaries
    assert shift(found) == pytest.approx(1.0, abs=0.2)
    assert not judge(found).refuted


@pytest.mark.parametrize(
    "words",
    [EVERYBODY, pytest.param(("rounds=2", "sampling.probability=0.5"), marks=LATER)],
)
def test_half_the_noise_is_found_from_outside(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    run = plan(*words, "privacy.user.target_epsilon=null", "privacy.user.noise_multiplier=1")
    halve_the_noise(monkeypatch)
    assert judge(audit_users(*run, AuditRequest(canaries=500, honest=0, runs=3))).refuted


def test_releases_are_read_from_an_optimizer_with_moments_too() -> None:
    run = plan(*EVERYBODY, "rounds=2", "server.optimizer=adam")
    found = audit_users(*run, AuditRequest(canaries=500, honest=0))
    one, two, run = (seen.scores.values for seen in found.observations)
    assert np.allclose(one + two, run)
    assert shift(found) == pytest.approx(2**0.5, abs=0.3)


def asks(canaries: Canaries, *, replaced: bool) -> CanaryTransport:
    user = central(1.0)
    return CanaryTransport(None, canaries, honest=3, user=user, replaced=replaced)


def test_with_cohorts_of_a_fixed_size_a_canary_that_is_out_sends_the_opposite() -> None:
    canaries = draw_canaries(20, 40, seeded_source(31))
    transport = asks(canaries, replaced=True)
    assert list(transport.available_clients()) == list(range(23))
    out = int(np.flatnonzero(~canaries.included)[0])
    (reply,) = transport.ask(
        TrainRequest(1, 0.5, client_settings(Settings())), torch.zeros(40), [3 + out]
    )
    assert torch.allclose(reply.update, -0.5 * canaries.direction(out).float())
    assert reply.below != canaries.bits[out]


def test_no_account_of_a_population_is_charged(tmp_path: Path) -> None:
    whose = (
        f"privacy.user.account={tmp_path / 'people.db'}",
        "sampling.population_name=people",
        "seed=null",
    )
    quiet = ("privacy.user.too_noisy=warn", "model.name=linear", "data.num_clients=40")
    experiment_of(load_config([*EVERYBODY, *quiet, *whose]), AuditRequest(canaries=20, honest=0))
    assert list(tmp_path.iterdir()) == []


def test_by_default_there_are_at_most_as_many_canaries_as_parameters() -> None:
    small = ("data.name=breast_cancer", "model.name=linear", "data.num_clients=200")
    config = load_config([*EVERYBODY, *small, "privacy.user.too_noisy=warn", "seed=7907"])
    found = experiment_of(config, AuditRequest(honest=0))
    assert found.settings["canaries"] == resolve(config)[0].num_params < 100
    with pytest.raises(
        ConfigError, match=r"--canaries must be within 1 \.\. [0-9]+, the number of"
    ):
        experiment_of(config, AuditRequest(canaries=100, honest=0))


WHOLE = ("training.batch_size=700", "data.num_clients=2")  # every example in every batch
SAMPLED = ("training.batch_size=350", "data.num_clients=2", "training.epochs=2")
WHOLE_OR_SAMPLED = pytest.mark.parametrize(
    "words", [WHOLE, pytest.param(SAMPLED, marks=LATER)], ids=["whole", "sampled"]
)


def settings(*words: str) -> tuple[Plan, Task]:
    on = (
        "privacy.user.enabled=false",
        "privacy.example.enabled=true",
        "privacy.example.noise_multiplier=1",
        "rounds=1",
    )
    quiet = (
        "model.name=linear",
        "seed=7927",
        "training.epochs=1",
        "privacy.delta=1e-3",
        "data.name=digits",
    )
    return resolve(config(*on, *quiet, *words))


@pytest.mark.parametrize(
    "declared", [(), ("data.public_num_examples=700",)], ids=["zero-out", "add or remove"]
)
@WHOLE_OR_SAMPLED
def test_dp_sgd_is_not_refuted(words: tuple[str, ...], declared: tuple[str, ...]) -> None:
    verdict = judge(audit_examples(*settings(*words, *declared), canaries=600))
    assert not verdict.refuted
    estimate = verdict.observations[-1].estimate
    assert estimate is not None
    # Scores of sampled batches are no Gaussians: the fit shows about half of the claim.
    assert estimate > 0.4 * verdict.observations[-1].claimed


@WHOLE_OR_SAMPLED
def test_half_the_noise_of_dp_sgd_is_found_from_outside(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    halve_the_noise(monkeypatch)
    assert judge(audit_examples(*settings(*words), canaries=600)).refuted


def test_batches_that_are_larger_than_what_is_accounted_are_found_from_outside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        step_draws,
        "poisson_sample",
        lambda size, *, probability, source: source.permutation(size),
    )
    assert judge(
        audit_examples(*settings(*WHOLE[1:], "training.batch_size=70"), canaries=600)
    ).refuted
