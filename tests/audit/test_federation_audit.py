"""The audit of a real federation: what it asks of its settings, and whole audits of processes and
nodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from discreet.audit.canaries import Scores, draw_canaries
from discreet.audit.user_audit import scored
from discreet.audit.verdict import judge
from discreet.planning.plan import Plan
from discreet.planning.state import State
from discreet.privacy.randomness import seeded_source
from discreet.run_files.compose import load_config
from discreet.server.resolve import resolve
from discreet.settings.settings import Settings
from tests.audit.federation_audit import audit_federation, words_of
from tests.made_runs import make_run

ROUNDS, Z, CLIP = 2, 1.0, 0.5
RUN = (
    f"rounds={ROUNDS}",
    "model.name=linear",
    "data.num_clients=40",
    "privacy.delta=1e-3",
    "sampling.kind=everyone",
    "server.momentum=0",
    "privacy.user.clip.kind=fixed",
    f"privacy.user.noise_multiplier={Z}",
    f"privacy.user.clip.norm={CLIP}",
)


def settings(*words: str) -> Settings:
    return load_config([*RUN, *words])


def test_a_configuration_as_overrides_is_read_back_without_paths_elsewhere(
    tmp_path: Path,
) -> None:
    lists = (
        "statistics.of=[moments]",
        "normaliser.means=[0.5,1e-7]",
        "normaliser.deviations=[1,2]",
    )
    account = (f"privacy.user.account={tmp_path / 'people.db'}", "sampling.population_name=people")
    config = settings(*lists, *account, 'data.path="/it\'s a folder"')
    off = ("evaluation.kind=none", "privacy.user.account=null")
    wanted = settings(
        *lists, *account[1:], *off, "privacy.user.too_noisy=warn", 'data.path="/it\'s a folder"'
    )
    assert load_config(words_of(config)) == wanted


def test_releases_are_read_from_checkpoints_with_the_accounted_noise(
    tmp_path: Path,
) -> None:
    # A round without any noise shows a canary that is in at its whole length; the next one, with an
    # empty sum, nothing.
    run = make_run(tmp_path / "run", *RUN, "privacy.user.too_noisy=warn")
    canaries = draw_canaries(30, 650, seeded_source(71))
    mean = sum(canaries.direction(number) for number in np.flatnonzero(canaries.included)) * (
        CLIP / 40
    )
    sums = torch.zeros(650), mean.float(), torch.zeros(650)
    states = [State(number, torch.zeros(650), total, CLIP) for number, total in enumerate(sums)]
    run.replace_metrics([{"round": number, "fraction_below": None} for number in (1, 2)])
    rounds, spent = scored(Plan(run.read_config()), run, states, canaries)
    for scores, released in zip(rounds, (1, 0), strict=True):
        assert scores.values == pytest.approx(released * canaries.included / Z**2, abs=1e-5)
    assert spent.num_releases == ROUNDS


def left_over(scores: Scores) -> np.ndarray:
    """What is left of the scores without the canaries: standard Gaussians, if the noise is what it
    is said to be."""
    left: np.ndarray = (scores.values - ROUNDS / Z**2 * scores.included) / (ROUNDS**0.5 / Z)
    return left


@pytest.mark.slow
def test_a_federation_of_processes_shows_its_canaries_and_no_more_than_it_claims() -> None:
    found = audit_federation(
        resolve(settings("privacy.user.too_noisy=warn"))[0], canaries=30, runs=2
    )
    left = left_over(found.observations[-1].scores)
    # Its noise is secure, so another one each time. False-alarm rate 1e-9.
    assert min(stats.chi2.sf(left @ left, 60), stats.chi2.cdf(left @ left, 60)) > 5e-10
    assert not judge(found, false_alarm=1e-9).refuted
