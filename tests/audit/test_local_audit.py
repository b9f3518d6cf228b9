"""The audit of local privacy: right code is not refuted, and what weakens it is found from outside. Seeds are fixed."""

from __future__ import annotations

import pytest

from discreet.audit.release_audit import audit_local
from discreet.audit.verdict import judge
from discreet.privacy import clipping
from discreet.server.plan import Plan, planned
from tests.audit.made import halve_the_noise
from tests.node.clients import config

KINDS = pytest.mark.parametrize("kind", ["gaussian", "laplace", "laplace_step"])
ENOUGH = 1000


def settings(kind: str, *words: str) -> Plan:
    noise = f"privacy.local.noise_multiplier={1 if kind == 'gaussian' else 0.5}"
    on = ("privacy.user.enabled=false", f"privacy.local.kind={kind}", noise, "seed=7933", "rounds=3")
    return planned(config(*on, "training.epochs=1", "privacy.noise=float", *words))


@pytest.mark.parametrize(("kind", "noise"), [("gaussian", "grid"), ("laplace", "grid"), ("laplace_step", "float")])
def test_a_local_release_is_not_refuted_and_shows_most_of_what_it_costs(kind: str, noise: str) -> None:
    verdict = judge(audit_local(settings(kind, f"privacy.noise={noise}"), releases=ENOUGH))
    run = verdict.observations[-1]
    assert not verdict.refuted
    assert max(bound["epsilon"] for bound in run.bounds.values()) > 0.65 * run.claimed


@KINDS
def test_half_the_noise_of_a_local_release_is_found_from_outside(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    halve_the_noise(monkeypatch)
    assert judge(audit_local(settings(kind), releases=ENOUGH)).refuted


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_an_update_that_is_not_clipped_is_found_from_outside(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(clipping, "clip_by_norm", lambda rows, clip_norm, *, order: (rows / 100, None))
    assert judge(audit_local(settings(kind), releases=ENOUGH)).refuted


def test_rounds_are_claimed_with_the_noise_of_each_and_add_up() -> None:
    words = ("privacy.local.noise_multiplier=null", "privacy.local.epsilon=6", "privacy.local.schedule=[1,2,3]")
    found = audit_local(settings("laplace", *words), releases=200, rounds=3)
    assert [round(seen.claim.epsilon) for seen in found.observations] == [1, 2, 3, 6]
    run = found.observations[-1].scores
    assert run.seen.sum() == pytest.approx(sum(seen.scores.seen.sum() for seen in found.observations[:-1]))
