"""Settings whose noise would drive the model are refused before they spend anything, by a rule that
was measured."""

from __future__ import annotations

import csv
import logging
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from discreet.planning.noise_outlook import NoiseOutlook, check_noise, noise_outlook, noise_ratio
from discreet.planning.plan import Plan, planned, resolve_noise
from discreet.planning.run_price import price_lines
from discreet.run_files.compose import load_asked, load_config
from discreet.server.resolve import resolve
from discreet.settings.rules import ConfigError
from discreet.settings.settings import Settings
from discreet.simulation.in_process import simulate

with (Path(__file__).resolve().parents[2] / "docs" / "results" / "noise_feedback.csv").open(
    newline=""
) as measured:
    MEASURED = list(csv.DictReader(measured))
PARAMS = 9610  # of the default model
TINY = [
    "data.name=breast_cancer",
    "data.num_clients=5",
    "model.name=logistic_regression",
    "training.epochs=1",
]
NOISY = [*TINY, "privacy.user.noise_multiplier=8", "rounds=11", "seed=60913", "privacy.noise=float"]
POINTS = 0.03


def outlook_of(settings: str) -> NoiseOutlook:
    plan = planned(load_config([*settings.split(), "privacy.user.too_noisy=warn"]))
    return noise_outlook(
        replace(plan, num_params=650 if plan.run.model.name == "logistic_regression" else PARAMS)
    )


def check(*words: str) -> None:
    asked = load_config(words)

    def of_rounds(rounds: int) -> Plan:
        return Plan(resolve_noise(replace(asked, rounds=rounds)), num_params=PARAMS)

    check_noise(of_rounds(asked.rounds), of_rounds)


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError, match="will not learn") as error:
        check(*words)
    return str(error.value)


def test_no_measured_run_that_is_allowed_ended_more_than_three_points_below_its_best() -> None:
    lost: dict[str, list[float]] = {}
    for row in MEASURED:
        if row["refused"] == "False":
            lost.setdefault(row["settings"], []).append(
                float(row["best_accuracy"]) - float(row["accuracy"])
            )
    assert len(lost) >= 20
    assert {settings: points for settings, points in lost.items() if fmean(points) > POINTS} == {}


def test_the_measured_feedback_and_refusals_are_those_of_the_rule() -> None:
    # Those whose noise is given: a target would have to be met anew for each.
    given = [row for row in MEASURED if "noise_multiplier" in row["settings"]]
    assert len(given) >= 10
    for row in given:
        outlook = outlook_of(row["settings"])
        assert (f"{outlook.feedback:.3g}", str(outlook.refused)) == (
            row["feedback"],
            row["refused"],
        )


def test_the_ratio_is_the_norm_of_the_noise_that_a_round_draws() -> None:
    # 4 times the parameters double it, twice the cohort halves it.
    assert noise_ratio(2.0, num_params=10_000, expected_cohort=50) == 4.0
    assert noise_ratio(2.0, num_params=40_000, expected_cohort=50) == 8.0
    assert noise_ratio(2.0, num_params=10_000, expected_cohort=100) == 2.0


def test_every_remedy_that_a_refusal_names_is_one() -> None:
    words = ["rounds=200"]
    said, asked = refusal(*words), load_config(words)

    def helps(config: Settings, num_params: int = PARAMS) -> bool:
        return not noise_outlook(replace(planned(config), num_params=num_params)).loud

    rounds, clients, params = (
        int(re.findall(pattern, said)[0])
        for pattern in (r"rounds=(\d+)", r"with (\d+) clients", r"with (\d+) parameters")
    )
    assert (rounds, "server.shrink_with_noise=true" in said) == (100, True)
    assert helps(replace(asked, rounds=rounds))
    assert helps(replace(asked, server=replace(asked.server, shrink_with_noise=True)))
    assert helps(replace(asked, data=replace(asked.data, num_clients=clients)))
    assert helps(asked, num_params=params)


def test_a_refusal_advises_no_change_that_leaves_the_noise_as_loud() -> None:
    # Five rounds at epsilon 0.1 would be short enough not to be refused, and noise 50 times as long
    # as the updates.
    said = refusal(
        "data.num_clients=3", "privacy.user.target_epsilon=0.1", "rounds=30", "privacy.delta=1e-5"
    )
    assert "rounds=" not in said
    assert "shrink_with_noise" not in said
    assert not re.search(r"with [01] parameters", said)


@pytest.mark.parametrize(("clients", "few"), [(3, True), (29, True), (30, False)])
def test_with_few_clients_the_example_level_is_named(clients: int, few: bool) -> None:
    said = refusal(
        f"data.num_clients={clients}",
        "privacy.user.target_epsilon=1",
        "rounds=200",
        "privacy.delta=1e-5",
    )
    assert ("protect examples rather than clients: DPSGD in" in said) == few


def test_a_refused_run_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"privacy\.user\.too_noisy=warn runs it anyway"):
        simulate(*load_asked([*NOISY, f"output_dir={tmp_path / 'run'}"]))
    assert not (tmp_path / "run").exists()


def test_a_run_that_only_asks_for_statistics_need_not_learn() -> None:
    words = ["data.num_clients=8", "statistics.noise_multiplier=5"]
    with pytest.raises(ConfigError, match="this run will not learn"):
        resolve(load_config(words))
    plan, _ = resolve(load_config([*words, "statistics.only=true"]))
    assert not any("learn" in line for line in price_lines(plan))


@pytest.mark.parametrize("word", ["rounds=10", "privacy.user.too_noisy=warn"])
def test_a_short_run_and_one_that_is_told_to_go_on_are_warned_of_by_the_same_measure(
    word: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    simulate(*load_asked([*NOISY, word, f"output_dir={tmp_path / 'run'}"]))
    (record,) = (record for record in caplog.records if "times the clip norm" in record.message)
    assert record.levelno == logging.WARNING
    assert re.search(r"\(noise feedback [\d.]+, limit 6\.5: docs/pitfalls\.md\)", record.message)
