"""The audit of masked sums: right code is not refuted, and planted faults are found from outside. Seeds are fixed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor

from discreet.audit.secure_audit import MakeVector, SecureAudit, audit_secure
from discreet.audit.verdict import judge
from discreet.client.noised_vector import noised_vector
from discreet.config import ConfigError, RunConfig
from discreet.federated.messages import TrainReply, TrainRequest
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


def for_all_nodes(vector: SecureSum, reply: TrainReply, request: TrainRequest, source: RandomSource) -> Tensor:
    """The noise is enough if all n clients survive, and honest: not if h do."""
    less = replace(vector, variance=vector.variance * vector.summands // vector.nodes)
    return noised_vector(less, reply, request, source)


def for_another_clip(vector: SecureSum, reply: TrainReply, request: TrainRequest, source: RandomSource) -> Tensor:
    """Noise for a clip norm that is half of the one that clipped."""
    return noised_vector(replace(vector, variance=vector.variance // 4), reply, request, source)


def one_adds_none(vector: SecureSum, reply: TrainReply, request: TrainRequest, source: RandomSource) -> Tensor:
    """A node that adds no noise: told by what it is asked, for the others of this audit send noise alone."""
    noised = noised_vector(vector, reply, request, source)
    return noised - vector.noise(source.child("secure", "update")) if request.work.trains else noised


def without_a_clip(vector: SecureSum, reply: TrainReply, request: TrainRequest, source: RandomSource) -> Tensor:
    """An update that is twice as long as the clip norm."""
    twice = vector.encode(reply.update, request.clip_norm) if request.work.trains else 0
    return noised_vector(vector, reply, request, source) + twice


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (for_all_nodes, ("privacy.secure.dropouts=2", "privacy.secure.colluding=2", "data.num_clients=7")),
        (for_another_clip, ()),
        (without_a_clip, ()),
        (one_adds_none, ("data.num_clients=4",)),
    ],
)
def test_a_planted_fault_of_masked_sums_is_found_from_outside(fault: MakeVector, words: tuple[str, ...]) -> None:
    assert judge(audit_secure(settings(*words), SecureAudit(500), make=fault)).refuted


@pytest.mark.parametrize(
    "words",
    [("privacy.user.aggregation=plain",), ("privacy.user.noise_multiplier=0",), ("evaluation.kind=private",)],
)
def test_what_is_no_masked_sum_with_noise_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="an audit of masked sums needs"):
        audit_secure(settings(*words), ENOUGH)


def test_one_release_is_not_enough() -> None:
    with pytest.raises(ConfigError, match="at least two releases of a masked sum"):
        audit_secure(settings(), SecureAudit(1))
