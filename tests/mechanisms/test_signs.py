"""A mechanism that is added from outside by one class works everywhere, and keeps to its event."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from discreet.accounting.accounting import epsilon_spent
from discreet.accounting.events import poisson_round_event
from discreet.audit.experiments import experiment_of
from discreet.audit.user_audit import AuditRequest
from discreet.audit.verdict import judge
from discreet.cli.main import main
from discreet.node.account import Refused
from discreet.planning.plan import Plan, planned
from discreet.planning.state import State, initial_state
from discreet.privacy.randomness import RandomSource
from discreet.protocol.messages import TrainReply, TrainRequest
from discreet.run_files.compose import load_asked, load_config
from discreet.run_files.run_folder import RunFolder
from discreet.settings.clip_choice import CLIP
from discreet.settings.privacy import Sizes
from discreet.settings.rules import ConfigError, settings_json
from discreet.settings.settings import Settings, client_settings
from discreet.simulation.in_process import simulate
from tests.mechanisms.made import run_of
from tests.mechanisms.signs import Signs
from tests.node.clients import received
from tests.replay import replay
from tests.rounds import round_of

NAME, Z, SIZE = "tests.mechanisms.signs:Signs", 1.3, 5
RUN = (
    f"privacy.user.mechanism={NAME}",
    "rounds=3",
    "model.name=linear",
    "data.num_clients=20",
    "seed=7919",
    "privacy.user.too_noisy=warn",
    "server.learning_rate=0.01",
    "server.momentum=0",
)


def config(*words: str) -> Settings:
    return load_config([*RUN, *words])


def run(folder: Path, *words: str) -> tuple[RunFolder, State]:
    outcome = simulate(*load_asked([*RUN, f"output_dir={folder}", *words]))
    return RunFolder(folder), outcome.checkpoint


def rounds(updates: list[Tensor], source: RandomSource) -> list[object]:
    release = Signs(run_of(Z), CLIP, Sizes(SIZE))
    replies = [TrainReply(1, update, below=False) for update in updates]
    state, metrics = round_of(
        release, initial_state(torch.zeros(SIZE), clip_norm=1.0), replies, source
    )
    return [state, replace(metrics, replies=0)]


@pytest.mark.parametrize("value", [0.0, 1e-30, 0.3, 1e30, math.inf, math.nan])
def test_one_client_more_or_less_moves_the_sum_of_signs_within_its_event(value: float) -> None:
    others, extra = [torch.randn(SIZE), torch.full((SIZE,), -9.0)], torch.full((SIZE,), value)
    for one, other in (([*others, extra], others), (others, [*others, extra])):
        found = replay(rounds, one, other)
        assert found.faults == ()
        assert found.gaussian_distance <= (1 + 1e-9) / Z
    if value in (0.3, 1e30):
        assert found.gaussian_distance == pytest.approx(1 / Z, rel=1e-5)


def test_a_run_charges_its_event_and_states_it(tmp_path: Path) -> None:
    folder, _ = run(tmp_path / "run")
    plan = Plan(folder.read_config())
    event = poisson_round_event(0.3, noise_multiplier=plan.run.user.noise_multiplier or 0.0)
    spent = folder.ledger(plan).spent("user")
    assert spent.entries == ((event, 3),)
    user = json.loads((folder.path / "privacy.json").read_text())["guarantees"][0]
    assert user["mechanism"] == "signs of updates, Gaussian noise on their sum"
    assert user["epsilon"]["pld"] == pytest.approx(epsilon_spent([(event, 3)], delta=1e-3))
    assert 7.9 < user["epsilon"]["pld"] <= 8  # the target of 8 has chosen the noise


def test_calibrate_reports_it_beside_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--population", "100", "--cohort", "30", "--rounds", "10", "--noise", "1")
    assert main(["calibrate", "user", "--mechanism", NAME, *words]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert any(NAME in row for row in rows)


def test_report_reads_its_run(tmp_path: Path) -> None:
    run(tmp_path / "run")
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "signs of updates" in (tmp_path / "run" / "report.html").read_text()


def test_audit_refutes_half_its_noise_and_not_its_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (
        "sampling.kind=everyone",
        "privacy.user.noise_multiplier=1",
        "privacy.user.target_epsilon=null",
    )
    assert not judge(experiment_of(config(*words), AuditRequest(canaries=400))).refuted
    half, real = Signs(run_of(0.5), CLIP, Sizes(650)), Signs.release
    monkeypatch.setattr(Signs, "release", lambda self, *given: real(half, *given))
    assert judge(experiment_of(config(*words), AuditRequest(canaries=400))).refuted


def test_a_node_obeys_a_name_only_if_its_owner_named_it() -> None:
    asked = TrainRequest(1, 0.3, planned(config()).run)
    with pytest.raises(Refused, match=r"mechanism .*data\.toml allows"):
        received(asked, {"partition-id": 0, "num-partitions": 20})


def test_a_request_names_a_mechanism_only_if_there_is_one() -> None:
    assert '"mechanism"' not in settings_json(client_settings(load_config([])))
    assert NAME in settings_json(client_settings(config()))


def test_a_word_that_names_no_class_is_not_taken_for_a_model(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^privacy\.user\.mechanism must be package\.module:Class \(got laplace\)",
    ):
        run(tmp_path / "run", "privacy.user.mechanism=laplace")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "words", [("evaluation.kind=private",), ("privacy.user.mechanism=nowhere:Nothing",)]
)
def test_what_it_can_not_do_and_a_name_of_nothing_are_refused(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.kind|privacy\.user\.mechanism"):
        run(tmp_path / "run", *words)
