"""The audit of user-level privacy: right code is not refuted, and half the noise is found from outside.

Seeds are fixed, so that a verdict is the same each time.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from discreet.audit.canaries import Canaries, draw_canaries
from discreet.audit.canary_scores import Experiment, Scores
from discreet.audit.example_audit import audit_examples
from discreet.audit.experiments import Asked, experiment_of
from discreet.audit.federation_audit import audit_federation, scored, words_of
from discreet.audit.gaussian_fit import epsilon_of_shift
from discreet.audit.release_audit import audit_local
from discreet.audit.user_audit import CanaryTransport, audit_users
from discreet.audit.verdict import judge
from discreet.data.examples import Task
from discreet.privacy import clipping
from discreet.privacy.randomness import seeded_source
from discreet.server.plan import Plan, planned
from discreet.server.session import resolve
from discreet.server.state import State
from discreet.settings.compose import load_config
from discreet.settings.rules import ConfigError
from discreet.settings.settings import Settings, described
from discreet.training import local_training
from tests.audit.made import halve_the_noise
from tests.made_runs import make_run
from tests.mechanisms.made import central
from tests.node.clients import config

EVERYBODY = ("sampling.kind=everyone", "rounds=1", "privacy.user.noise_multiplier=1")


def plan(*words: str) -> tuple[Plan, Task]:
    quiet = ("privacy.user.too_noisy=warn", "model.name=linear", "data.num_clients=600", "seed=7919")
    return resolve(load_config([*quiet, *words]))


def shift(experiment: Experiment) -> float:
    """How far apart the scores in and out are, in standard deviations."""
    scores = experiment.observations[-1].scores
    return float((scores.seen.mean() - scores.unseen.mean()) / scores.unseen.std())


@pytest.mark.parametrize(("noise", "kind"), [("grid", "adaptive"), ("float", "fixed"), ("secure_sum", "adaptive")])
def test_a_round_shows_all_that_its_event_says_and_no_more(noise: str, kind: str) -> None:
    run = plan(*EVERYBODY, f"privacy.noise={noise}", f"privacy.user.clip.kind={kind}")
    found = audit_users(*run, canaries=500, honest=0, runs=2)
    assert found.observations[-1].claim.epsilon == pytest.approx(3.139, abs=1e-3)  # of z = 1: REFERENCES of the paper
    assert shift(found) == pytest.approx(1.0, abs=0.2)  # 1 / z; three standard errors of 1000 canaries
    assert not judge(found).refuted


@pytest.mark.parametrize("words", [EVERYBODY, ("rounds=2", "sampling.probability=0.5")])
def test_half_the_noise_is_found_from_outside(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    run = plan(*words, "privacy.user.target_epsilon=null", "privacy.user.noise_multiplier=1")
    halve_the_noise(monkeypatch)
    assert judge(audit_users(*run, canaries=500, honest=0, runs=3)).refuted


def test_releases_are_read_from_an_optimizer_with_moments_too() -> None:
    run = plan(*EVERYBODY, "rounds=2", "server.optimizer=adam")
    found = audit_users(*run, canaries=500, honest=0)
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
    (reply,) = transport.ask(round_number=1, params=torch.zeros(40), clip_norm=0.5, cohort=[3 + out])
    assert torch.allclose(reply.update, -0.5 * canaries.direction(out).float())
    assert reply.below != canaries.bits[out]


def test_no_account_of_a_population_is_charged(tmp_path: Path) -> None:
    whose = (f"privacy.user.account={tmp_path / 'people.db'}", "sampling.population_name=people", "seed=null")
    quiet = ("privacy.user.too_noisy=warn", "model.name=linear", "data.num_clients=40")
    experiment_of(load_config([*EVERYBODY, *quiet, *whose]), Asked(canaries=20, honest=0))
    assert list(tmp_path.iterdir()) == []


WHOLE = ("training.batch_size=700", "data.num_clients=2")  # every example in every batch
SAMPLED = ("training.batch_size=350", "data.num_clients=2", "training.epochs=2")


def of_examples(*words: str) -> tuple[Plan, Task]:
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
    verdict = judge(audit_examples(*of_examples(*words, *declared), canaries=600))
    assert not verdict.refuted
    estimate = verdict.observations[-1].estimate
    # Scores of sampled batches are no Gaussians: the fit shows about half of the claim.
    assert estimate > 0.4 * verdict.observations[-1].claimed


@pytest.mark.parametrize("words", [WHOLE, SAMPLED], ids=["whole", "sampled"])
def test_half_the_noise_of_dp_sgd_is_found_from_outside(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    halve_the_noise(monkeypatch)
    assert judge(audit_examples(*of_examples(*words), canaries=600)).refuted


def test_batches_that_are_larger_than_what_is_accounted_are_found_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_training, "poisson_sample", lambda size, *, probability, source: source.permutation(size))
    assert judge(audit_examples(*of_examples(*WHOLE[1:], "training.batch_size=70"), canaries=600)).refuted


KINDS = pytest.mark.parametrize("kind", ["gaussian", "laplace", "laplace_step"])
ENOUGH = 1000


def local_plan(kind: str, *words: str) -> Plan:
    noise = f"privacy.local.noise_multiplier={1 if kind == 'gaussian' else 0.5}"
    on = ("privacy.user.enabled=false", f"privacy.local.kind={kind}", noise, "seed=7933", "rounds=3")
    return planned(config(*on, "training.epochs=1", "privacy.noise=float", *words))


@pytest.mark.parametrize(("kind", "noise"), [("gaussian", "grid"), ("laplace", "grid"), ("laplace_step", "float")])
def test_a_local_release_is_not_refuted_and_shows_most_of_what_it_costs(kind: str, noise: str) -> None:
    verdict = judge(audit_local(local_plan(kind, f"privacy.noise={noise}"), releases=ENOUGH))
    run = verdict.observations[-1]
    assert not verdict.refuted
    assert max(bound["epsilon"] for bound in run.bounds.values()) > 0.65 * run.claimed


@KINDS
def test_half_the_noise_of_a_local_release_is_found_from_outside(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    halve_the_noise(monkeypatch)
    assert judge(audit_local(local_plan(kind), releases=ENOUGH)).refuted


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_an_update_that_is_not_clipped_is_found_from_outside(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(clipping, "clip_by_norm", lambda rows, clip_norm, *, order: (rows / 100, None))
    assert judge(audit_local(local_plan(kind), releases=ENOUGH)).refuted


def test_rounds_are_claimed_with_the_noise_of_each_and_add_up() -> None:
    words = ("privacy.local.noise_multiplier=null", "privacy.local.epsilon=6", "privacy.local.schedule=[1,2,3]")
    found = audit_local(local_plan("laplace", *words), releases=200, rounds=3)
    assert [round(seen.claim.epsilon) for seen in found.observations] == [1, 2, 3, 6]
    run = found.observations[-1].scores
    assert run.seen.sum() == pytest.approx(sum(seen.scores.seen.sum() for seen in found.observations[:-1]))


def rated_run(*words: str) -> Settings:
    rated = ("evaluation.kind=private", "evaluation.noise_multiplier=1", "privacy.user.target_epsilon=null")
    noise = ("privacy.user.noise_multiplier=1", "privacy.user.too_noisy=warn", "seed=7937", "model.name=linear")
    return config(*rated, *noise, "sampling.kind=everyone", "data.num_clients=20", *words)


def ratings(releases: int, *words: str) -> Experiment:
    return experiment_of(rated_run(*words), Asked("evaluation", canaries=releases))


def statistics(releases: int, *words: str) -> Experiment:
    return experiment_of(rated_run(*words), Asked("statistics", canaries=releases))


JOINED = ("evaluation.cohort=same",)
OWN_OR_JOINED = pytest.mark.parametrize("words", [(), JOINED], ids=["own", "joined"])


# Two Gaussians of multiplier 1 about one client are one of 1 / sqrt(2).
@pytest.mark.parametrize(("words", "noise_multiplier"), [(("privacy.noise=grid",), 1.0), (JOINED, 2**-0.5)])
def test_a_rating_is_not_refuted_and_shows_most_of_what_it_costs(
    words: tuple[str, ...], noise_multiplier: float
) -> None:
    (run,) = judge(ratings(ENOUGH, *words)).observations
    assert run.claimed == pytest.approx(epsilon_of_shift(1 / noise_multiplier, delta=1e-3), abs=1e-3)
    assert run.refuted_by == ()
    assert run.estimate == pytest.approx(run.claimed, rel=0.15)  # 3.139 +- 0.15 by 1000 releases each way


@OWN_OR_JOINED
def test_half_the_noise_of_ratings_is_found_from_outside(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    halve_the_noise(monkeypatch)
    assert judge(ratings(400, *words)).refuted


@pytest.mark.parametrize(("noise", "of"), [("float", "moments"), ("grid", "quantiles,examples")])
def test_statistics_are_not_refuted_and_show_most_of_what_they_cost(noise: str, of: str) -> None:
    asked = (f"statistics.of=[{of}]", "statistics.noise_multiplier=1", f"privacy.noise={noise}")
    (run,) = judge(statistics(ENOUGH, *asked)).observations
    assert run.refuted_by == ()
    assert run.claimed == pytest.approx(3.139, abs=1e-3)  # of z = 1: REFERENCES of the paper
    assert run.estimate == pytest.approx(run.claimed, rel=0.15)


def test_half_the_noise_of_statistics_is_found_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    halve_the_noise(monkeypatch)
    assert judge(statistics(ENOUGH, "statistics.noise_multiplier=1")).refuted


@pytest.mark.parametrize("cohort", ["own", "same"])
def test_ratings_of_a_run_that_would_not_begin_are_not_audited(cohort: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="these settings will not learn"):
        ratings(2, f"evaluation.cohort={cohort}", "privacy.user.too_noisy=refuse", "rounds=90", "model.name=mlp")
    account = (f"privacy.user.account={tmp_path / 'people.db'}", "sampling.population_name=people", "seed=null")
    with pytest.raises(ConfigError, match=r"people\.db is missing"):
        ratings(2, f"evaluation.cohort={cohort}", *account)


ROUNDS, Z, CLIP = 2, 1.0, 0.5
RUN = (
    *(f"rounds={ROUNDS}", "model.name=linear", "data.num_clients=40", "privacy.delta=1e-3"),
    *("sampling.kind=everyone", "server.momentum=0", "privacy.user.clip.kind=fixed"),
    *(f"privacy.user.noise_multiplier={Z}", f"privacy.user.clip.norm={CLIP}"),
)


def federated(*words: str) -> Settings:
    return load_config([*RUN, *words])


def test_a_configuration_as_overrides_is_read_back_without_what_would_leave_traces_elsewhere(tmp_path: Path) -> None:
    lists = ("statistics.of=[moments]", "normaliser.means=[0.5,1e-7]", "normaliser.deviations=[1,2]")
    account = (f"privacy.user.account={tmp_path / 'people.db'}", "sampling.population_name=people")
    config = federated(*lists, *account, 'data.path="/it\'s a folder"')
    off = ("evaluation.kind=none", "privacy.user.account=null")
    wanted = federated(*lists, *account[1:], *off, "privacy.user.too_noisy=warn", 'data.path="/it\'s a folder"')
    assert load_config(words_of(described(config))) == wanted


def test_releases_are_read_from_checkpoints_and_rows_with_the_noise_that_was_accounted(tmp_path: Path) -> None:
    # A round without any noise shows a canary that is in at its whole length; the next one, with an empty sum, nothing.
    run = make_run(tmp_path / "run", *RUN, "privacy.user.too_noisy=warn")
    canaries = draw_canaries(30, 650, seeded_source(71))
    mean = sum(canaries.direction(number) for number in np.flatnonzero(canaries.included)) * (CLIP / 40)
    releases = [State(number + 1, torch.zeros(650), mean.float() * (1 - number), CLIP) for number in (0, 1)]
    run.replace_metrics([{"round": number, "fraction_below": None} for number in (1, 2)])
    rounds, spent = scored(run, releases, canaries)
    for scores, released in zip(rounds, (1, 0), strict=True):
        assert scores.values == pytest.approx(released * canaries.included / Z**2, abs=1e-5)
    assert spent.num_releases == ROUNDS


def left_over(scores: Scores) -> np.ndarray:
    """What is left of the scores without the canaries: standard Gaussians, if the noise is what it is said to be."""
    return (scores.values - ROUNDS / Z**2 * scores.included) / (ROUNDS**0.5 / Z)


@pytest.mark.slow
def test_a_federation_of_processes_shows_its_canaries_and_no_more_than_it_claims() -> None:
    found = audit_federation(resolve(federated("privacy.user.too_noisy=warn"))[0], canaries=30, runs=2)
    left = left_over(found.observations[-1].scores)
    # Its noise is secure, so another one each time. False-alarm rate 1e-9.
    assert min(stats.chi2.sf(left @ left, 60), stats.chi2.cdf(left @ left, 60)) > 5e-10
    assert not judge(found, false_alarm=1e-9).refuted
