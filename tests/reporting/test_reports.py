"""Reports: what is read from run folders, what is said of it, and the page."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent, LaplaceDpEvent
from hypothesis import given
from hypothesis import strategies as st

from discreet.reporting.drawing import SERIES
from discreet.reporting.page import report_of
from discreet.reporting.pictures import coloured, frontier
from discreet.reporting.records import RunRecord, find_runs, group_runs, read_runs, tried_settings
from discreet.reporting.spending import choice_costs, epsilon_curves, spent_by_data_owner, worst_epsilons
from discreet.reporting.table import repetitions_table, runs_table, split_same
from discreet.server.run_folder import RunFolder
from discreet.settings.rules import ConfigError
from discreet.simulation.tuning import score
from tests.made_runs import ENDED, charge_clients, make_run

NOISE = "privacy.user.noise_multiplier"
OFF = ("privacy.user.enabled=false", "privacy.user.target_epsilon=null")
EXAMPLE_ON = (*OFF, "privacy.example.enabled=true", "privacy.example.noise_multiplier=1", "data.num_clients=2")
LOCAL_ON = (*OFF, "privacy.local.kind=laplace", "privacy.local.noise_multiplier=2", "data.num_clients=2")


def read(*folders: RunFolder) -> list[RunRecord]:
    return read_runs([folder.path for folder in folders])


def test_runs_are_found_below_a_folder_once_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("10", "2", "deep/1"):
        make_run(tmp_path / name, f"{NOISE}=1")
    assert [record.name for record in read_runs(find_runs([tmp_path, tmp_path / "2"]))] == ["2", "10", "deep/1"]


def test_a_path_without_a_run_is_said_and_a_run_before_its_first_round_is_left_out(tmp_path: Path) -> None:
    for name, said in (("missing", "not a folder"), (".", "no run folder")):
        with pytest.raises(ConfigError, match=said):
            find_runs([tmp_path / name])
    folders = [make_run(tmp_path / "0", f"{NOISE}=1"), make_run(tmp_path / "1", f"{NOISE}=1", accuracies=())]
    assert [record.name for record in read(*folders)] == ["0"]
    with pytest.raises(ConfigError, match="finished a round"):
        read(folders[1])


def test_settings_that_decide_nothing_are_no_difference(tmp_path: Path) -> None:
    fixed = f"{NOISE}=1", "privacy.user.clip.kind=fixed"
    more = "privacy.user.clip.target_quantile=0.9", "data.alpha=3"
    runs = make_run(tmp_path / "0", *fixed, "seed=11"), make_run(tmp_path / "1", *fixed, *more)
    assert tried_settings(read(*runs)) == []


def test_a_group_is_called_by_what_it_differs_in(tmp_path: Path) -> None:
    tried = [(target, kind) for target in (2, 4) for kind in ("mlp", "cnn")]
    words = [(f"privacy.user.target_epsilon={target}", "rounds=2", f"model.name={kind}") for target, kind in tried]
    runs = [make_run(tmp_path / str(number), *given) for number, given in enumerate(words)]
    labels = [group.label for group in group_runs(read(*runs))]
    assert labels == [f"model.name {kind}, user.target_epsilon {target}" for target, kind in tried]


def test_a_run_that_was_lost_has_the_accuracy_of_its_model(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(number), f"{NOISE}=1", accuracies=(0.3, 0.8, 0.1)) for number in (2, 0)]
    for number, run in zip((2, 0), runs, strict=True):
        run.write_privacy(ENDED | {"model_round": number})
    best, untrained = read(*runs)
    assert (best.of_model("accuracy"), best.epsilon("user")) == (0.8, 3.0)
    assert untrained.of_model("accuracy") is None
    assert [row["accuracy"] for row in runs_table([best, untrained])] == ["0.8000", ""]
    assert [score(run.path) for run in runs] == [0.8, -math.inf]


def test_repetitions_are_one_group_with_their_spread(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / str(seed), f"{NOISE}=1", f"seed={seed}", accuracies=(0.1, seed / 10)) for seed in (5, 7)
    ]
    (row,) = repetitions_table(read(*runs))
    assert [*row.values()] == ["all runs", "2", "0.6000", "0.1414", "0.5000", "0.7000"]
    assert repetitions_table(read(runs[0])) == []


def test_the_table_has_a_row_a_run_and_says_once_what_is_the_same_in_all(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(z), f"{NOISE}={z}", accuracies=(0.2, 0.3 + z / 10)) for z in (1, 2)]
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


def test_a_curve_follows_the_client_that_has_spent_most_by_then(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", *EXAMPLE_ON, accuracies=(0.1, 0.2, 0.3))
    rows = (run.path / "metrics.csv").read_text().replace("inf,inf,inf", "inf,1.5,inf")
    (run.path / "metrics.csv").write_text(rows)
    loud, quiet = GaussianDpEvent(1.0), GaussianDpEvent(2.0)
    charge_clients(run, "example", [(1, "0", loud, 1), (1, "1", quiet, 1), (2, "1", quiet, 5), (3, "1", quiet, 5)])
    curve = epsilon_curves(read(run)[0], "example")["rdp"]
    alone = [worst_epsilons({"": [(event, n)]}, 1e-3)["rdp"] for event, n in ((loud, 1), (quiet, 6), (quiet, 11))]
    assert curve == list(zip((1.0, 2.0, 3.0), alone, strict=True))
    assert alone == sorted(alone)


def test_laplace_noise_has_a_pure_epsilon_too(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", *LOCAL_ON)
    charge_clients(run, "local", [(1, "0", LaplaceDpEvent(2.0), 3)])
    assert worst_epsilons(spent_by_data_owner(read(run)[0], "local"), 1e-3)["pure (delta = 0)"] == 1.5


def test_choosing_among_ten_runs_costs_what_is_published(tmp_path: Path) -> None:
    overrides = (f"{NOISE}=1", "sampling.probability=0.01", "privacy.delta=1e-6")
    runs = [make_run(tmp_path / str(n), *overrides, accuracies=(0.5,), per_round=1000) for n in range(10)]
    assert choice_costs(read(*runs)) == [
        "user-level, choosing the best: epsilon 7.414 for all 10 runs, 2.437 for one (rdp, delta 1e-06); "
        "the runs add up"
    ]
    assert choice_costs(read(runs[0])) == []


def test_a_run_without_the_guarantee_over_the_same_clients_makes_all_runs_infinite(tmp_path: Path) -> None:
    paying = [make_run(tmp_path / str(n), f"{NOISE}=1") for n in range(2)]
    plain = [make_run(tmp_path / str(n), *OFF) for n in (2, 3)]
    (cost,) = choice_costs(read(*paying, *plain))
    assert "epsilon inf for all 4 runs" in cost
    assert cost.endswith("no user-level guarantee in 2 of the runs, which are over the same clients")


def test_a_baseline_and_a_bar_for_repetitions_are_drawn(tmp_path: Path) -> None:
    for number, (noise, accuracy) in enumerate(((1, 0.6), (1, 0.7), (2, 0.5))):
        make_run(tmp_path / str(number), f"{NOISE}={noise}", f"seed={number}", accuracies=(0.1, accuracy))
    make_run(tmp_path / "3", *OFF, accuracies=(0.2, 0.9))
    picture = {each.title: each for each in report_of([tmp_path]).pictures}["Accuracy against epsilon: user-level"]
    assert "Dashed: without privacy, 0.9000" in picture.note
    assert "LineCollection" in picture.svg


def test_runs_of_clients_that_noise_themselves_add_up(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(n), *LOCAL_ON) for n in range(2)]
    for run in runs:
        text = (run.path / "metrics.csv").read_text()
        (run.path / "metrics.csv").write_text(text.replace("inf,inf,inf", "inf,inf,0.5"))
        charge_clients(run, "local", [(1, "0", LaplaceDpEvent(2.0), 1)])
    (cost,) = choice_costs(read(*runs))
    assert "add up" in cost
    assert 0.9 < float(re.findall(r"epsilon ([\d.]+) for all", cost)[0]) <= 1.0  # two pure epsilons of 0.5, at a delta


def test_runs_that_deal_the_data_differently_share_no_cost(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(n), f"{NOISE}=1", f"data.num_clients={n}") for n in (20, 30)]
    (cost,) = choice_costs(read(*runs))
    assert "epsilon not stated for all 2 runs" in cost
    assert "deal the data" in cost


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 1)), max_size=12))
def test_the_frontier_is_what_no_other_point_beats(points: list[tuple[float, float]]) -> None:
    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return one[0] <= other[0] and one[1] >= other[1] and one != other

    assert frontier(points) == sorted(one for one in points if not any(beats(other, one) for other in points))


def test_if_there_are_more_groups_than_colours_the_most_accurate_are_coloured(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(n), f"rounds={n + 1}", f"{NOISE}=1", accuracies=(n / 20,)) for n in range(12)]
    groups = coloured(read(*runs))
    assert [group.label for group in groups] == [f"rounds {n + 1}" for n in (*range(4, 12), *range(4))]
    assert len(SERIES) == 8


def test_repetitions_are_drawn_as_their_mean_over_the_rounds_that_all_have(tmp_path: Path) -> None:
    make_run(tmp_path / "0", f"{NOISE}=1", "seed=3", accuracies=(0.2, 0.5, 0.9))
    make_run(tmp_path / "1", f"{NOISE}=1", "seed=4", accuracies=(0.4, 0.9))
    (group,) = group_runs(read_runs(find_runs([tmp_path])))
    assert group.mean_series("accuracy") == [(1.0, pytest.approx(0.3)), (2.0, pytest.approx(0.7))]
    picture = report_of([tmp_path]).pictures[0]
    assert "Lines are means" in picture.note


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs")
    for noise in (1, 2, 4):
        make_run(
            folder / f"<{noise}>", f"{NOISE}={noise}", f"privacy.user.clip.norm={noise}", accuracies=(0.3, 0.9 / noise)
        )
    report_of([folder]).write_page(folder / "report.html")
    return (folder / "report.html").read_text()


def test_the_page_fetches_nothing_and_its_pictures_share_no_identifier(html: str) -> None:
    assert not re.search(r"<(script|link|img|iframe)\b|@import|url\((?!#)", html)
    links, ids = re.findall(r'(?:src|href)="([^"]*)"', html), re.findall(r'\sid="([^"]*)"', html)
    assert all(link.startswith("#") for link in links)
    assert {*re.findall(r"url\(#([^)]+)\)", html), *(link[1:] for link in links)} <= {*ids}
    assert len(set(ids)) == len(ids)
    pictures = re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)
    assert len(pictures) == 4
    assert all(ElementTree.fromstring(svg).tag.endswith("svg") for svg in pictures)
    without = re.sub(r"<svg.*?</svg>|<meta[^>]*>", "", html, flags=re.DOTALL).partition("<html")[2]
    ElementTree.fromstring(f"<html{without}".replace("&nbsp;", " "))  # each tag is closed, and in its place


def test_the_page_says_what_is_off_and_what_choosing_costs(html: str) -> None:
    assert html.count("none (epsilon = inf)") == 2
    assert "What choosing costs" in html
    assert "The same in every run" in html
    assert "&lt;1&gt;" in html
    assert "<1>" not in html


def test_a_report_of_one_run_lies_in_its_folder_with_its_settings(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", f"{NOISE}=1", "seed=3", ended=False)
    report_of([run.path]).write_page(run.path / "report.html")
    text = (run.path / "report.html").read_text()
    assert "it protects nobody" in text
    assert "had not ended" in text
    assert "privacy.user.clip.target_quantile" in text
