"""The audit of a real federation: what it asks of its settings, and whole audits of processes and nodes."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from discreet.audit import federation_audit
from discreet.audit.canaries import draw_canaries
from discreet.audit.canary_scores import Scores
from discreet.audit.federation_audit import audit_federation, check_federation, kept_checkpoints, scored, words_of
from discreet.audit.verdict import judge
from discreet.deployment import local_federation
from discreet.privacy.randomness import seeded_source
from discreet.server.plan import planned
from discreet.server.session import resolve
from discreet.server.state import State
from discreet.settings.compose import load_config
from discreet.settings.places import PACKAGE
from discreet.settings.rules import ConfigError
from discreet.settings.settings import Settings, described
from tests.made_runs import make_run

ROUNDS, Z, CLIP = 2, 1.0, 0.5
RUN = (
    *(f"rounds={ROUNDS}", "model.name=linear", "data.num_clients=40", "privacy.delta=1e-3"),
    *("sampling.kind=everyone", "server.momentum=0", "privacy.user.clip.kind=fixed"),
    *(f"privacy.user.noise_multiplier={Z}", f"privacy.user.clip.norm={CLIP}"),
)


def settings(*words: str) -> Settings:
    return load_config([*RUN, *words])


def test_a_configuration_as_overrides_is_read_back_without_what_would_leave_traces_elsewhere(tmp_path: Path) -> None:
    lists = ("statistics.of=[moments]", "normaliser.means=[0.5,1e-7]", "normaliser.deviations=[1,2]")
    account = (f"privacy.user.account={tmp_path / 'people.db'}", "sampling.population_name=people")
    config = settings(*lists, *account, 'data.path="/it\'s a folder"')
    off = ("evaluation.kind=none", "privacy.user.account=null")
    wanted = settings(*lists, *account[1:], *off, "privacy.user.too_noisy=warn", 'data.path="/it\'s a folder"')
    assert load_config(words_of(described(config))) == wanted


@pytest.mark.parametrize(
    ("words", "canaries", "runs", "message"),
    [
        (("seed=7",), 20, 1, "seed must be null"),
        (("privacy.user.noise_multiplier=0",), 20, 1, "privacy.user.enabled must be true, with noise"),
        (("sampling.kind=fixed", "privacy.accountant=rdp"), 20, 1, "an audit of a federation needs sampling.kind"),
        (("evaluation.kind=private",), 20, 1, "an audit of a federation needs sampling.kind"),
        ((), 19, 1, r"needs 20 \.\. 40 canaries"),
        ((), 41, 1, r"needs 20 \.\. 40 canaries"),
        ((), 20, 0, "at least one run"),
    ],
)
def test_what_a_federation_can_not_show_is_refused(
    words: tuple[str, ...], canaries: int, runs: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_federation(planned(settings(*words)), canaries, runs)


def test_every_checkpoint_is_kept_although_the_run_replaces_each(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "rounds=1")
    run.checkpoint_path.unlink(missing_ok=True)
    pause = threading.Event()
    with kept_checkpoints(run) as kept:
        for number in range(1, 6):
            run.save_checkpoint(State(number, torch.full((3,), float(number)), torch.zeros(3), 1.0))
            pause.wait(0.1)
    assert [(each.round, float(each.params[0])) for each in kept] == [(number, number) for number in range(1, 6)]


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
    left: np.ndarray = (scores.values - ROUNDS / Z**2 * scores.included) / (ROUNDS**0.5 / Z)
    return left


@pytest.mark.slow
def test_a_federation_of_processes_shows_its_canaries_and_no_more_than_it_claims() -> None:
    found = audit_federation(resolve(settings("privacy.user.too_noisy=warn"))[0], canaries=30, runs=2)
    left = left_over(found.observations[-1].scores)
    # Its noise is secure, so another one each time. False-alarm rate 1e-9.
    assert min(stats.chi2.sf(left @ left, 60), stats.chi2.cdf(left @ left, 60)) > 5e-10
    assert not judge(found, false_alarm=1e-9).refuted


FAULTS = {  # in files that only the server runs: those of the bundle must be the nodes'
    "round.py": """

_whole = dp_fedavg_round
def dp_fedavg_round(state, replies, settings, **more):
    release = replace(settings.release, noise_multiplier=settings.release.noise_multiplier / 2)
    return _whole(state, replies, replace(settings, release=release), **more)
""",
    "run_context.py": """

def source_of(seed): return RandomSource(bytes(range(32)), is_secure=True)
""",
}


@pytest.mark.slow
def test_half_the_noise_of_a_federation_is_found_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The ServerApp runs a Discreet whose noise is half as large, and seeded, so that the verdict is the same each time.
    for name in (PACKAGE.name, "conf", "strategies", "client_app", "server_app"):
        shutil.copytree(PACKAGE.parent / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, fault in FAULTS.items():
        faulty = tmp_path / PACKAGE.name / "server" / name
        faulty.write_text(faulty.read_text() + fault)
    monkeypatch.setattr(local_federation, "REPOSITORY", tmp_path)  # from where the ServerApp imports Discreet
    monkeypatch.setattr(federation_audit, "secure_source", lambda: seeded_source(7963))
    found = audit_federation(resolve(settings("data.num_clients=72", "privacy.user.too_noisy=warn"))[0], canaries=72)
    assert judge(found).judgements[-1].refuted_by
