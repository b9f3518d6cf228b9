"""The audit of DP-SGD: right code is not refuted, and what weakens it is found from outside. Seeds are fixed."""

from __future__ import annotations

import pytest

from discreet.audit.example_audit import audit_examples
from discreet.audit.verdict import judge
from discreet.data.examples import Task
from discreet.server.plan import Plan
from discreet.server.session import resolve
from discreet.training import local_training
from tests.audit.made import halve_the_noise
from tests.node.clients import config

WHOLE = ("training.batch_size=700", "data.num_clients=2")  # every example in every batch
SAMPLED = ("training.batch_size=350", "data.num_clients=2", "training.epochs=2")


def settings(*words: str) -> tuple[Plan, Task]:
    on = (
        "privacy.user.enabled=false",
        "privacy.example.enabled=true",
        "privacy.example.noise_multiplier=1",
        "rounds=1",
    )
    quiet = ("model.name=linear", "seed=7927", "training.epochs=1", "privacy.delta=1e-3", "data.name=digits")
    return resolve(config(*on, *quiet, *words))


@pytest.mark.parametrize("declared", [(), ("data.public_num_examples=700",)], ids=["zero-out", "add or remove"])
@pytest.mark.parametrize("words", [WHOLE, SAMPLED], ids=["whole", "sampled"])
def test_dp_sgd_is_not_refuted(words: tuple[str, ...], declared: tuple[str, ...]) -> None:
    verdict = judge(audit_examples(*settings(*words, *declared), canaries=600))
    assert not verdict.refuted
    estimate = verdict.observations[-1].estimate
    assert estimate is not None
    # Scores of sampled batches are no Gaussians: the fit shows about half of the claim.
    assert estimate > 0.4 * verdict.observations[-1].claimed


@pytest.mark.parametrize("words", [WHOLE, SAMPLED], ids=["whole", "sampled"])
def test_half_the_noise_of_dp_sgd_is_found_from_outside(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    halve_the_noise(monkeypatch)
    assert judge(audit_examples(*settings(*words), canaries=600)).refuted


def test_batches_that_are_larger_than_what_is_accounted_are_found_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_training, "poisson_sample", lambda size, *, probability, source: source.permutation(size))
    assert judge(audit_examples(*settings(*WHOLE[1:], "training.batch_size=70"), canaries=600)).refuted
