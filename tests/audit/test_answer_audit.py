"""The audit of private evaluation: right code is not refuted, and half the noise is found. Seeds are fixed."""

from __future__ import annotations

from pathlib import Path

import pytest

from discreet.audit.canary_scores import Experiment
from discreet.audit.experiments import Asked, experiment_of
from discreet.audit.gaussian_fit import epsilon_of_shift
from discreet.audit.verdict import judge
from discreet.settings.rules import ConfigError
from discreet.settings.settings import Settings
from tests.audit.made import halve_the_noise
from tests.node.clients import config

ENOUGH = 1000


def settings(*words: str) -> Settings:
    rated = ("evaluation.kind=private", "evaluation.noise_multiplier=1", "privacy.user.target_epsilon=null")
    noise = ("privacy.user.noise_multiplier=1", "privacy.user.too_noisy=warn", "seed=7937", "model.name=linear")
    return config(*rated, *noise, "sampling.kind=everyone", "data.num_clients=20", *words)


def ratings(releases: int, *words: str) -> Experiment:
    return experiment_of(settings(*words), Asked("evaluation", canaries=releases))


def statistics(releases: int, *words: str) -> Experiment:
    return experiment_of(settings(*words), Asked("statistics", canaries=releases))


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
