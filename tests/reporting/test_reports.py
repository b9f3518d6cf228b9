"""Reports: what is read from run folders, what is said of it and of private evaluation, and the
page."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from functools import cache
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from hypothesis import given
from hypothesis import strategies as st

from discreet.cli.status import status_facts, status_lines
from discreet.ledger.durable_ledger import Charge
from discreet.planning.constant_guess import FILE as CONSTANT
from discreet.planning.plan import Plan
from discreet.reporting.page import report_of
from discreet.reporting.pictures import frontier
from discreet.reporting.records import RunRecord, read_runs, runs_table, split_same
from discreet.reporting.spending import (
    choice_costs,
    ratings_cost,
    spent_by_data_owner,
    worst_epsilons,
)
from discreet.run_files.run_folder import RunFolder
from discreet.run_files.whole_files import write_json
from discreet.settings.rules import ConfigError
from discreet.simulation.tuning import score
from tests.made_runs import ENDED, make_run

NOISE = "privacy.user.noise_multiplier"


def read(*folders: RunFolder) -> list[RunRecord]:
    return read_runs([folder.path for folder in folders])


def test_a_run_that_was_lost_has_the_accuracy_of_its_model(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / str(number), f"{NOISE}=1", accuracies=(0.3, 0.8, 0.1))
        for number in (2, 0)
    ]
    for number, run in zip((2, 0), runs, strict=True):
        write_json(run.path / "privacy.json", ENDED | {"model_round": number})
    best, untrained = read(*runs)
    assert (best.of_model("accuracy"), best.epsilon("user")) == (0.8, 3.0)
    assert untrained.of_model("accuracy") is None
    assert [row["accuracy"] for row in runs_table([best, untrained])] == ["0.8000", ""]
    assert [score(run.path) for run in runs] == [0.8, -math.inf]


def test_the_table_has_a_row_a_run_and_says_once_what_is_the_same_in_all(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / str(z), f"{NOISE}={z}", accuracies=(0.2, 0.3 + z / 10)) for z in (1, 2)
    ]
    same, rows = split_same(runs_table(read(*runs)))
    found = [(row["run"], row["accuracy"], row["user.noise_multiplier"]) for row in rows]
    assert found == [("1", "0.4000", "1"), ("2", "0.5000", "2")]
    assert {*rows[0]} & {*same} == set()
    assert (same["epsilon example"], same["noise"], same["delta"]) == ("inf", "secure", "0.001")


def test_epsilon_by_every_accountant_is_what_is_published(tmp_path: Path) -> None:
    overrides = (f"{NOISE}=3", "sampling.probability=0.1", "privacy.delta=1e-6")
    run = make_run(tmp_path / "run", *overrides, accuracies=(0.5, 0.6), per_round=256)
    found = worst_epsilons(spent_by_data_owner(read(run)[0], "user"), 1e-6)
    assert (found["pld"], found["rdp"]) == pytest.approx((3.7697, 4.0510), abs=1e-4)
    assert found["pld"] < found["rdp"] < found["rdp, classic conversion"]


def test_choosing_among_ten_runs_costs_what_is_published(tmp_path: Path) -> None:
    overrides = (f"{NOISE}=1", "sampling.probability=0.01", "privacy.delta=1e-6")
    runs = [
        make_run(tmp_path / str(n), *overrides, accuracies=(0.5,), per_round=1000)
        for n in range(10)
    ]
    (said,) = choice_costs(read(*runs))
    assert re.findall(r"[\d.]+(?:e-\d+)?", said) == ["7.414", "10", "2.437", "1e-06"]
    assert said.startswith("user-level")
    assert said.endswith("add up")
    assert choice_costs(read(runs[0])) == []


def test_what_a_run_spent_before_its_first_round_counts_in_the_choice(tmp_path: Path) -> None:
    overrides = (f"{NOISE}=1", "sampling.probability=0.01", "privacy.delta=1e-6")
    for number in range(10):
        run = make_run(tmp_path / str(number), *overrides, accuracies=(0.5,), per_round=1000)
        if number > 3:
            run.metrics_path.unlink()
    (said,) = report_of([tmp_path]).costs
    assert said.startswith(
        "user-level, choosing the best: epsilon 7.414 for all 4 runs and 6 without a round, 2.437"
    )
    run.ledger_path.unlink()
    assert "epsilon 6.9" in report_of([tmp_path]).costs[0]  # that folder holds nothing of a run


def test_a_run_whose_ledger_is_lost_is_named(tmp_path: Path) -> None:
    for number in range(2):
        run = make_run(tmp_path / str(number), f"{NOISE}=1")
    run.ledger_path.unlink()
    with pytest.raises(ConfigError, match=r"1 has lost its ledger.db, so what it has spent is not"):
        report_of([tmp_path])


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 1)), max_size=12))
def test_the_frontier_is_what_no_other_point_beats(points: list[tuple[float, float]]) -> None:
    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return one[0] <= other[0] and one[1] >= other[1] and one != other

    assert frontier(points) == sorted(
        one for one in points if not any(beats(other, one) for other in points)
    )


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs")
    for noise in (1, 2, 4):
        make_run(
            folder / f"<{noise}>",
            f"{NOISE}={noise}",
            f"privacy.user.clip.norm={noise}",
            accuracies=(0.3, 0.9 / noise),
        )
    report_of([folder]).write_page(folder / "report.html")
    return (folder / "report.html").read_text()


def test_a_picture_of_epsilon_names_the_deltas_of_the_runs_that_it_shows(tmp_path: Path) -> None:
    make_run(tmp_path / "user", f"{NOISE}=1", "privacy.delta=1e-4")
    off = ("privacy.user.enabled=false", "privacy.user.target_epsilon=null")
    make_run(tmp_path / "none", *off, "privacy.delta=1e-3")
    (shown,) = [
        each for each in report_of([tmp_path]).pictures if each.title.startswith("Epsilon after")
    ]
    assert shown.note == "At delta 0.0001, by pld."


def test_the_page_of_a_run_says_that_its_model_is_no_better_and_why_it_stopped(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path / "run", f"{NOISE}=1", accuracies=(0.6, 0.9))
    guess = {"share": 0.7, "loss": None, "uneven": False}
    write_json(run.path / CONSTANT, guess)
    write_json(run.path / "privacy.json", ENDED | {"model_round": 1, "stopped": "it <diverged>"})
    report_of([tmp_path]).write_page(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "The model: accuracy 0.600 is not above the share of the largest class, 0.700" in page
    assert "The run was stopped: it &lt;diverged&gt;." in page


def test_the_page_fetches_nothing_and_its_pictures_share_no_identifier(html: str) -> None:
    assert not re.search(r"<(script|link|img|iframe)\b|@import|url\((?!#)", html)
    links, ids = re.findall(r'(?:src|href)="([^"]*)"', html), re.findall(r'\sid="([^"]*)"', html)
    assert all(link.startswith("#") for link in links)
    assert {*re.findall(r"url\(#([^)]+)\)", html), *(link[1:] for link in links)} <= {*ids}
    assert len(set(ids)) == len(ids)
    pictures = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    assert len(pictures) == 5
    assert all(ElementTree.fromstring(svg).tag.endswith("svg") for svg in pictures)
    without = re.sub(r"<svg.*?</svg>|<meta[^>]*>", "", html, flags=re.DOTALL).partition("<html")[2]
    # each tag is closed, and in its place
    ElementTree.fromstring(f"<html{without}".replace("&nbsp;", " "))


def test_the_page_says_what_is_off_and_what_choosing_costs(html: str) -> None:
    assert html.count("none (epsilon = inf)") == 2
    assert "What choosing costs" in html
    assert "The same in every run" in html
    assert "&lt;1&gt;" in html
    assert "<1>" not in html


WORDS = (
    "privacy.user.noise_multiplier=2",
    "evaluation.kind=private",
    "evaluation.every=1",
    "evaluation.noise_multiplier=3",
    "sampling.probability=0.5",
)
ERRORS = (0.05, 0.04)  # in all, by noise


@cache
def epsilon_of_both() -> float:
    """Of two rounds and their two ratings, at delta 1e-3."""
    accountant = PLDAccountant()
    for noise in (2.0, 3.0):
        accountant.compose(PoissonSampledDpEvent(0.5, GaussianDpEvent(noise)), 2)
    return float(accountant.get_epsilon(1e-3))


def rated_run(
    path: Path, *words: str, last: tuple[float, float, float] = (0.7, *ERRORS)
) -> RunFolder:
    """Two rounds, each rated: the last one by `last`, a value with both errors."""
    folder = make_run(path, *WORDS, *words)
    folder.ledger(Plan(folder.read_config())).charge(
        [Charge(2, "user", "", PoissonSampledDpEvent(0.5, GaussianDpEvent(3.0)), 2)]
    )
    first, second = folder.read_metrics()
    names = ("accuracy", "accuracy_error", "accuracy_error_by_noise")
    first |= dict(zip(names, (0.5, *ERRORS), strict=True))
    second |= dict(zip(names, last, strict=True)) | {"epsilon_user": epsilon_of_both()}
    folder.replace_metrics([first, second])
    return folder


def record_of(folder: RunFolder) -> RunRecord:
    return read_runs([folder.path])[0]


def test_status_has_a_line_with_the_last_rating_and_both_errors(tmp_path: Path) -> None:
    folder = rated_run(tmp_path / "run")
    (line,) = (line for line in status_lines(folder) if line.startswith("rated"))
    assert (
        line
        == "rated      after round 2 by clients: accuracy 0.7000 (standard error 0.0500; 0.0400 "
        "by noise alone)"
    )
    numbers = [{"name": "accuracy", "value": 0.7, "error": 0.05, "by_noise": 0.04}]
    assert status_facts(folder)["rating"] == {"round": 2, "numbers": numbers}
    assert not any(line.startswith("model") for line in status_lines(folder))


def test_the_price_is_the_difference_to_the_same_rounds_without_ratings(tmp_path: Path) -> None:
    (said,) = ratings_cost(record_of(rated_run(tmp_path / "run")))
    with_ratings, without = (
        float(number)
        for number in re.findall(r"epsilon ([\d.]+) with 2 ratings, ([\d.]+)", said)[0]
    )
    plain = (
        PLDAccountant()
        .compose(PoissonSampledDpEvent(0.5, GaussianDpEvent(2.0)), 2)
        .get_epsilon(1e-3)
    )
    assert without == pytest.approx(plain, rel=1e-3)
    assert with_ratings > 1.1 * without


def test_a_client_that_noises_its_own_answers_pays_for_them_alone(tmp_path: Path) -> None:
    off = (
        "privacy.user.enabled=false",
        "privacy.user.noise_multiplier=null",
        "privacy.user.target_epsilon=null",
    )
    on = (
        "privacy.example.enabled=true",
        "privacy.example.noise_multiplier=1",
        "data.num_clients=2",
    )
    folder = make_run(tmp_path / "run", *WORDS, *off, *on)
    folder.replace_metrics(
        [row | {"accuracy_error": 0.1, "epsilon_example": 5.0} for row in folder.read_metrics()]
    )
    (said,) = ratings_cost(record_of(folder))
    alone = PLDAccountant().compose(GaussianDpEvent(3.0), 2).get_epsilon(1e-3)
    assert f"its answers to 2 ratings, if it gave them all, cost {alone:.4g} alone" in said


def test_further_metrics_that_clients_gave_are_in_the_table_with_their_errors(
    tmp_path: Path,
) -> None:
    folder = rated_run(tmp_path / "run")
    further = {
        "calibration_error": 0.08,
        "calibration_error_error": 0.02,
        "calibration_error_error_by_noise": 0.01,
    }
    folder.replace_metrics([row | further for row in folder.read_metrics()])
    (row,) = runs_table([record_of(folder)])
    assert (row["calibration_error"], row["calibration_error_error"]) == ("0.0800", "0.0200")
    assert not any(name.endswith("by_noise") for name in row)
