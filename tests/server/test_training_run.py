"""A run ends before the round that would pass its budget, or if its loss diverges, and states its
guarantees."""

from __future__ import annotations

import csv
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import discreet.queries.metrics
from discreet.ledger.durable_ledger import DurableLedger
from discreet.planning.plan import planned, resolve_noise
from discreet.planning.state import Outcome
from discreet.privacy.grid import LARGEST_SCALE, laplace_grid_slack
from discreet.queries.evaluation_result import EvaluationResult
from discreet.run_files.call import Call
from discreet.run_files.compose import load_asked, load_config
from discreet.run_files.resuming import asked_settings
from discreet.run_files.run_folder import ASKED, RunFolder
from discreet.server.training_run import stopping_reason
from discreet.settings.rules import ConfigError
from discreet.settings.settings import Settings
from discreet.simulation.in_process import simulate
from tests.command import simulate as simulate_command

SMALL = ["data.num_clients=20", "model.name=logistic_regression", "training.epochs=1", "seed=61493"]
COLUMNS = (
    "round,loss,accuracy,clip_norm,fraction_below,cohort,replies,"
    "epsilon_user,epsilon_example,epsilon_local,seconds"
)


def test_a_target_is_reached_at_the_planned_round_and_never_passed(tmp_path: Path) -> None:
    words = [*SMALL, "rounds=4", "privacy.user.target_epsilon=3", f"output_dir={tmp_path / 'run'}"]
    outcome = simulate(*load_asked(words))
    assert outcome.stopped is None
    epsilon = DurableLedger(tmp_path / "run" / "ledger.db").spent("user").epsilon(1e-3)
    assert 0.999 * 3 <= epsilon <= 3


def test_the_budget_ends_the_run_before_the_round_that_would_pass_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = ["rounds=50", "privacy.user.noise_multiplier=1", "privacy.user.max_epsilon=5"]
    words += ["privacy.user.too_noisy=warn"]
    with caplog.at_level(logging.INFO, logger="discreet"):
        outcome = simulate(*load_asked([*SMALL, *words, f"output_dir={tmp_path / 'run'}"]))
    spent = DurableLedger(tmp_path / "run" / "ledger.db").spent("user")
    assert "privacy.user.max_epsilon=5" in outcome.stopped
    assert "is left" in outcome.stopped
    assert spent.epsilon(1e-3) <= 5 < spent.record(spent.entries[0][0]).epsilon(1e-3)
    assert spent.num_releases == outcome.checkpoint.round
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert any("stopped after round" in message for message in caplog.messages)


def test_the_run_folder_holds_what_is_promised(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    simulate(*load_asked([*SMALL, "rounds=2", f"output_dir={folder}"]))
    names = {
        "config.yaml",
        "metrics.csv",
        "ledger.db",
        "privacy.json",
        "model.safetensors",
        "checkpoint",
    }
    assert names <= {path.name for path in folder.iterdir()}
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.reader(file))
    assert ",".join(rows[0]) == COLUMNS
    assert [row[0] for row in rows[1:]] == ["1", "2"]
    facts = json.loads((folder / "privacy.json").read_text())
    assert [guarantee["name"] for guarantee in facts["guarantees"]] == ["user", "example", "local"]
    user, example, local = facts["guarantees"]
    assert set(user["epsilon"]) == {"pld", "rdp"}
    assert example["epsilon"] == local["epsilon"] == {"pld": "inf"}
    assert user["floating_point"]["noise"] == "grid"
    assert 0 < user["floating_point"]["delta_slack"] < 1e-15
    assert user["not_covered"]
    with pytest.raises(ConfigError, match="contains a run already: resume=true"):
        simulate(*load_asked([*SMALL, "rounds=2", f"output_dir={folder}"]))


CANCER = [
    "data.name=breast_cancer",
    "data.num_clients=20",
    "model.name=logistic_regression",
    "training.epochs=1",
]
PRIVATE = ["privacy.user.noise_multiplier=1", "sampling.probability=0.5", "seed=60913"]
NOT_PRIVATE = ["privacy.user.enabled=false", "privacy.user.target_epsilon=null", "seed=60913"]
# lost after round 7: chance is log(2), twice that is 1.39
FALLS_THEN_GROWS = [
    0.6,
    0.2,
    2.0,
    3.0,
    5.0,
    4.0,
    6.0,
    0.1,
]


def run(folder: Path, *words: str) -> tuple[Outcome, RunFolder]:
    return simulate(*load_asked([*CANCER, *words, f"output_dir={folder}"])), RunFolder(folder)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The losses that the public test set will show, in order."""
    losses = list(FALLS_THEN_GROWS)
    monkeypatch.setattr(
        discreet.queries.metrics,
        "evaluate",
        lambda *_, **__: EvaluationResult(losses.pop(0), {"accuracy": 0.5}),
    )
    return losses


@pytest.fixture
def lost(tmp_path: Path, scripted: Sequence[float]) -> tuple[Outcome, RunFolder]:
    return run(tmp_path / "run", *PRIVATE, "rounds=8")


def test_a_run_that_diverges_ends_and_says_why_everywhere(lost: tuple[Outcome, RunFolder]) -> None:
    outcome, folder = lost
    reason = (
        "the loss on the public test set diverged: 6 after round 7, 0.2 after round 2; the model "
        "is the one after round 2"
    )
    status, privacy = (
        json.loads((folder.path / name).read_text()) for name in ("status.json", "privacy.json")
    )
    assert (status["state"], status["reason"], outcome.stopped) == ("stopped", reason, reason)
    assert (privacy["stopped"], privacy["rounds"], privacy["model_round"]) == (reason, 7, 2)


def test_its_model_is_the_best_public_one_and_its_ledger_holds_all_rounds(
    lost: tuple[Outcome, RunFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    _, short = run(tmp_path / "two rounds", *PRIVATE, "rounds=2")
    found, expected = (load_file(folder.path / "model.safetensors") for folder in (lost[1], short))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert DurableLedger(lost[1].ledger_path).spent("user").num_releases == 7


def test_a_lost_run_that_is_resumed_ends_again_and_spends_nothing(
    lost: tuple[Outcome, RunFolder], tmp_path: Path
) -> None:
    before = load_file(lost[1].path / "model.safetensors")
    outcome, folder = run(tmp_path / "run", *PRIVATE, "rounds=20", "resume=true")
    assert outcome.stopped == lost[0].stopped
    assert DurableLedger(folder.ledger_path).spent("user").num_releases == 7
    after = load_file(folder.path / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_best_model_is_known_to_a_run_that_is_resumed(
    tmp_path: Path, scripted: list[float]
) -> None:
    run(tmp_path / "run", *PRIVATE, "rounds=4")
    outcome, _ = run(tmp_path / "run", *PRIVATE, "rounds=8", "resume=true")
    assert (outcome.checkpoint.round, outcome.model.round) == (7, 2)


@pytest.mark.parametrize(("keep", "kept"), [("last", 4), ("best", 2)])
def test_the_best_round_is_kept_where_that_is_asked(
    keep: str, kept: int, tmp_path: Path, scripted: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    # Losses 0.6, 0.2, 2.0 and 3.0; resumed in between.
    words = [*PRIVATE, f"evaluation.keep={keep}"]
    run(tmp_path / "run", *words, "rounds=3")
    with caplog.at_level(logging.INFO, logger="discreet"):
        outcome, folder = run(tmp_path / "run", *words, "rounds=4", "resume=true")
    assert (outcome.checkpoint.round, outcome.model.round) == (4, kept)
    assert json.loads((folder.path / "privacy.json").read_text())["model_round"] == kept
    assert ("the one after round 2" in caplog.text) == (keep == "best")
    assert ("do not trust its probabilities" in caplog.text) == (keep == "last")
    assert DurableLedger(folder.ledger_path).spent("user").num_releases == 4


@pytest.mark.parametrize("kind", ["private", "none"])
def test_the_best_round_is_never_chosen_by_a_private_rating(kind: str) -> None:
    words = [f"evaluation.kind={kind}", "evaluation.keep=best"]
    with pytest.raises(ConfigError, match=r"evaluation\.keep must be last"):
        load_config(words)


def test_a_loss_that_is_no_number_ends_the_run_with_a_model_of_numbers(tmp_path: Path) -> None:
    outcome, folder = run(
        tmp_path / "run", *NOT_PRIVATE, "rounds=8", "model.name=mlp", "training.learning_rate=1e4"
    )
    assert "is nan after round" in outcome.stopped
    assert outcome.model.round < outcome.checkpoint.round
    assert all(
        torch.isfinite(tensor).all()
        for tensor in load_file(folder.path / "model.safetensors").values()
    )


def test_a_run_that_may_still_learn_is_not_lost() -> None:
    better, bad_start = [9.0, 8.5, 8.0, 7.5, 7.0, 6.5], [2.3, 9.0, 9.0, 9.0, 9.0, 2.0]
    overfits = [0.2, 0.3, 0.4, 0.6, 0.8, 1.2, 1.8]  # and is better than chance
    for losses in ([], [2.3] * 9, better, bad_start, overfits):
        assert stopping_reason(losses, chance_loss=math.log(10)) is None


def test_the_clip_norm_stops_at_its_ceiling_which_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = ["rounds=5", "privacy.user.clip.norm=1e-4", "privacy.user.clip.learning_rate=9"]
    with caplog.at_level(logging.INFO, logger="discreet"):
        _, folder = run(tmp_path / "run", *PRIVATE, *words)
    norms = [row["clip_norm"] for row in folder.read_metrics()]
    assert max(norm or 0.0 for norm in norms) == pytest.approx(1e-3)
    assert sum("privacy.user.clip.max=0.001:" in message for message in caplog.messages) == 1


@pytest.mark.parametrize(("words", "ceiling"), [([], 10.0), (["privacy.user.clip.max=2"], 2.0)])
def test_the_ceiling_is_ten_times_the_first_norm_unless_it_is_given(
    words: list[str], ceiling: float
) -> None:
    assert load_config(words).privacy.user.clip.ceiling == ceiling


TWO_ROUNDS = [
    "rounds=2",
    "data.num_clients=5",
    "model.name=logistic_regression",
    "training.epochs=1",
    "seed=24781",
]
FACTS = (
    "unit",
    "adjacency",
    "trusted",
    "observer",
    "mechanism",
    "accounting",
    "not_covered",
    "epsilon",
    "epsilon_is",
)
NO_USER = ["privacy.user.enabled=false", "privacy.user.target_epsilon=null"]


def statement(folder: Path, *words: str) -> dict[str, Any]:
    simulate(*load_asked([*TWO_ROUNDS, *words, f"output_dir={folder}"]))
    facts = json.loads((folder / "privacy.json").read_text())
    return {guarantee["name"]: guarantee for guarantee in facts["guarantees"]}


def test_privacy_json_says_of_every_guarantee_what_the_page_says(tmp_path: Path) -> None:
    words = ["privacy.example.enabled=true", "privacy.example.noise_multiplier=2"]
    said = statement(tmp_path / "run", *words)
    assert list(said) == ["user", "example", "local"]
    for name in ("user", "example"):
        assert all(said[name][fact] for fact in FACTS)
    assert said["user"]["adjacency"] == "add or remove one client"
    assert said["example"]["adjacency"] == "zero-out: one example contributes nothing, n stays"
    assert said["user"]["floating_point"]["delta_slack"] < 1e-12
    assert said["example"]["floating_point"]["noise"] == "rounded"
    assert 0 < said["example"]["floating_point"]["delta_slack"] < 1e-12
    unrounded = statement(tmp_path / "float", *words, "privacy.noise=float")["example"]
    assert unrounded["floating_point"] == {"noise": "float", "delta_slack": "not bounded"}


def test_example_level_is_zero_out_unless_the_number_of_examples_is_declared() -> None:
    words = ("privacy.example.enabled=true", "privacy.example.noise_multiplier=2")
    sampled = planned(
        load_config(["data.partition=sampled", "data.examples_per_client=10"])
    ).guarantees
    assert all(any("views overlap" in words for words in each.not_covered) for each in sampled)
    zero_out, declared = (
        planned(load_config([*words, *more])).guarantees[1]
        for more in ([], ["data.public_num_examples=40"])
    )
    assert zero_out.adjacency == "zero-out: one example contributes nothing, n stays"
    assert "q = batch_size / n," in zero_out.mechanism
    assert any(
        "adding or removing an example: it changes q" in words for words in zero_out.not_covered
    )
    assert declared.adjacency == "add or remove one example"
    assert "q = batch_size / public_num_examples = 8 / 40," in declared.mechanism
    assert not any(
        "number n" in words or "views overlap" in words for words in declared.not_covered
    )


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_a_guarantee_that_is_off_has_no_mechanism_and_an_infinite_epsilon(
    kind: str, tmp_path: Path
) -> None:
    words = [
        f"privacy.local.kind={kind}",
        "privacy.local.epsilon=1",
        "rounds=1",
        "sampling.kind=everyone",
    ]
    said = statement(tmp_path / "run", *NO_USER, *words)
    assert (said["user"]["mechanism"], said["user"]["accounting"]) == ("none", "none")
    assert set(said["user"]["epsilon"].values()) == {"inf"}
    assert (said["local"]["adjacency"], said["local"]["trusted"]) == (
        "replace",
        "only the client itself",
    )
    assert (said["local"]["epsilon"]["pure"] == "inf") == (kind == "gaussian")


def test_the_slack_of_laplace_noise_is_enough_for_its_pure_epsilon(tmp_path: Path) -> None:
    words = [
        "privacy.local.kind=laplace",
        "privacy.local.noise_multiplier=0.1",
        "privacy.delta=0.1",
    ]
    # such a delta is refused by a client with ten
    few = [
        "data.partition=sampled",
        "data.examples_per_client=9",
    ]
    local = statement(tmp_path / "run", *NO_USER, *words, *few, "sampling.kind=everyone")["local"]
    pure, at_delta = local["epsilon"]["pure"], local["epsilon"]["pld"]
    slack = 2 * laplace_grid_slack(28 * 28 * 10 + 10 + 1, LARGEST_SCALE)  # two rounds
    assert pure == 20
    assert at_delta < 19.9
    assert local["floating_point"]["delta_slack"] == pytest.approx(
        (1 + math.exp(20)) * slack, rel=1e-9
    )


@pytest.mark.parametrize(("kind", "amplified"), [("poisson", True), ("everyone", False)])
def test_amplification_is_said_to_need_a_secret_cohort_where_there_is_any(
    kind: str, amplified: bool, tmp_path: Path
) -> None:
    said = statement(tmp_path / "run", f"sampling.kind={kind}", "rounds=1")
    assert any("amplification" in words for words in said["user"]["not_covered"]) == amplified


STARTED = (
    "rounds=2",
    "data.num_clients=20",
    "model.name=logistic_regression",
    "training.epochs=1",
    "privacy.user.target_epsilon=4",
    "privacy.user.clip.norm=0.5",
)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was started with settings of its own, and ended after its first
    round."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    config = resolve_noise(load_config(STARTED))
    simulate(replace(config, rounds=1), Call(str(folder)))
    RunFolder(folder).write_config(config)
    RunFolder(folder).write_config(load_config(STARTED), name=ASKED)
    return folder


def resumed(folder: Path, *words: str) -> Settings:
    settings, call = asked_settings(["resume=true", f"output_dir={folder}", *words])
    assert call == Call(str(folder), resume=True)
    return settings


@pytest.mark.parametrize("words", [(), STARTED, ("privacy.user.target_epsilon=4",)])
def test_a_run_goes_on_with_the_settings_of_its_folder(
    words: tuple[str, ...], started: Path
) -> None:
    before, after = RunFolder(started).read_config(), resumed(started, *words, "rounds=9")
    assert after == replace(before, rounds=9)
    assert after.privacy.user.max_epsilon == 4


def test_what_is_no_matter_of_privacy_may_be_changed(started: Path) -> None:
    after = resumed(
        started,
        "operations.predictions=true",
        "server.learning_rate=0.5",
        "operations={log_format: json}",
    )
    operations = after.operations
    assert (operations.predictions, after.server.learning_rate, operations.log_format) == (
        True,
        0.5,
        "json",
    )


REFUSED = {
    "privacy.user.noise_multiplier=2": "which has privacy.user.noise_multiplier=",
    "privacy.user.max_epsilon=9": "which has privacy.user.max_epsilon=4",
    "privacy.delta=1e-4": "which has privacy.delta=0.001",
    "model.name=mlp": "which has model.name=logistic_regression",
    "seed=71933": "which has seed=None",
    "privacy.example={enabled: true, noise_multiplier: 1}": "which has privacy.example.enabled=False",
    "experiment=silos": "which has ",
}


@pytest.mark.parametrize(("word", "message"), REFUSED.items())
def test_what_decides_privacy_is_refused_by_the_name_that_was_typed(
    word: str, message: str, started: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        resumed(started, "rounds=9", word)
    assert str(error.value).startswith(f"{word} can't change in a resumed run, ")
    assert message in str(error.value)


def test_rounds_over_which_clients_spread_a_total_stay(tmp_path: Path) -> None:
    words = (
        "privacy.user.enabled=false",
        "privacy.local.kind=gaussian",
        "privacy.local.epsilon=8",
        "rounds=4",
    )
    RunFolder(tmp_path).write_config(load_config(words))
    assert resumed(tmp_path, *words).rounds == 4
    with pytest.raises(
        ConfigError,
        match=r"rounds=5 can't change .*rounds=4\. .*: device",
    ):
        resumed(tmp_path, "rounds=5")


def test_simulate_goes_on_as_the_readme_says(
    started: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate_command(["resume=true", f"output_dir={started}"]) == 0
    checkpoint = RunFolder(started).load_checkpoint()
    assert checkpoint.round == 2
    assert simulate_command(["resume=true", f"output_dir={started}", "seed=71933"]) == 2
    assert "discreet: seed=71933 can't change" in capsys.readouterr().err


def test_a_folder_of_an_earlier_version_whose_settings_name_its_call_goes_on(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    simulate(
        *load_asked([*SMALL, "privacy.user.noise_multiplier=4", "rounds=1", f"output_dir={folder}"])
    )
    path = folder / "config.yaml"
    path.write_text(f"output_dir: {folder}\nresume: false\n{path.read_text()}")
    outcome = simulate(*asked_settings(["resume=true", f"output_dir={folder}", "rounds=2"]))
    assert outcome.checkpoint.round == 2
