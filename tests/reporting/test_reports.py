"""Reports: what is read from run folders, what is said of it, and the page."""

from __future__ import annotations

import csv
import io
import math
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent, LaplaceDpEvent
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from discreet.cli import tune
from discreet.cli.report import show
from discreet.federated.run_folder import RunFolder
from discreet.reporting.drawing import SERIES
from discreet.reporting.page import Report, report_of
from discreet.reporting.pictures import coloured, frontier
from discreet.reporting.records import RunRecord, find_runs, group_runs, read_runs, tried_settings
from discreet.reporting.spending import (
    ACCOUNTANTS,
    PRIMIHUB,
    accountants_of,
    choice_costs,
    epsilon_curves,
    epsilons,
    spent_by_holder,
)
from discreet.reporting.table import repetitions_table, runs_table, swept_line
from discreet.settings.rules import ConfigError
from tests.command import report as report_command
from tests.made_runs import ENDED, charge_clients, make_run

ROOT = Path(__file__).resolve().parent.parent.parent
NOISE = "privacy.user.noise_multiplier"
OFF = ("privacy.user.enabled=false", "privacy.user.target_epsilon=null")
EXAMPLE_ON = (*OFF, "privacy.example.enabled=true", "privacy.example.noise_multiplier=1", "data.num_clients=2")
LOCAL_ON = (*OFF, "privacy.local.kind=laplace", "privacy.local.noise_multiplier=2", "data.num_clients=2")


def read(*folders: RunFolder) -> list[RunRecord]:
    return read_runs([folder.path for folder in folders])


def test_runs_are_found_below_a_folder_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("10", "2", "deep/1"):
        make_run(tmp_path / name, f"{NOISE}=1")
    (tmp_path / "elsewhere").mkdir()
    assert [record.name for record in read_runs(find_runs([tmp_path]))] == ["2", "10", "deep/1"]


def test_a_run_that_is_named_twice_is_one_run(tmp_path: Path) -> None:
    make_run(tmp_path / "a", f"{NOISE}=1")
    assert len(find_runs([tmp_path, tmp_path / "a"])) == 1


@pytest.mark.parametrize("name", ["missing", "."])
def test_a_path_without_a_run_is_said(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run folder|not a folder"):
        find_runs([tmp_path / name])


def test_a_run_before_its_first_round_is_left_out(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / "0", f"{NOISE}=1"), make_run(tmp_path / "1", f"{NOISE}=1", accuracies=())]
    assert [record.name for record in read(*folders)] == ["0"]
    with pytest.raises(ConfigError, match="finished a round"):
        read(folders[1])


def test_settings_that_decide_nothing_are_no_difference(tmp_path: Path) -> None:
    first = make_run(tmp_path / "0", f"{NOISE}=1", "privacy.user.clip.kind=fixed", "seed=11")
    second = make_run(
        tmp_path / "1",
        f"{NOISE}=1",
        "privacy.user.clip.kind=fixed",
        "privacy.user.clip.target_quantile=0.9",
        "data.alpha=3",
    )
    assert tried_settings(read(first, second)) == []


def test_a_group_is_called_by_what_it_differs_in(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / f"{z}{kind}", f"{NOISE}={z}", f"model.name={kind}")
        for z in (1, 2)
        for kind in ("mlp", "cnn")
    ]
    labels = [group.label for group in group_runs(read(*runs))]
    assert labels == [f"model.name {kind}, noise_multiplier {z}" for z in (1, 2) for kind in ("mlp", "cnn")]


def test_a_run_that_was_lost_has_the_accuracy_of_its_model(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(number), f"{NOISE}=1", accuracies=(0.3, 0.8, 0.1)) for number in (2, 0)]
    for number, run in zip((2, 0), runs, strict=True):
        run.write_privacy(ENDED | {"model_round": number})
    best, untrained = read(*runs)
    assert (best.of_model("accuracy"), best.epsilon("user")) == (0.8, 3.0)
    assert untrained.of_model("accuracy") is None
    assert [row[1] for row in runs_table([best, untrained]).rows] == ["0.8000", ""]
    assert [tune.score(run.path) for run in runs] == [0.8, -math.inf]


def test_repetitions_are_one_group_with_their_spread(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / str(seed), f"{NOISE}=1", f"seed={seed}", accuracies=(0.1, seed / 10)) for seed in (5, 7)
    ]
    table = repetitions_table(read(*runs))
    assert table is not None
    assert table.rows == (("all runs", "2", "0.6000", "0.1414", "0.5000", "0.7000"),)
    assert repetitions_table(read(runs[0])) is None


def test_the_csv_holds_a_row_a_run_and_what_was_tried(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(z), f"{NOISE}={z}", accuracies=(0.2, 0.3 + z / 10)) for z in (1, 2)]
    rows = list(csv.DictReader(io.StringIO(runs_table(read(*runs)).to_csv())))
    assert [row["noise_multiplier"] for row in rows] == ["1", "2"]
    assert [row["accuracy"] for row in rows] == ["0.4000", "0.5000"]
    assert rows[0]["epsilon example"] == "inf"
    assert rows[0]["noise"] == "secure"


def test_a_run_whose_name_is_a_formula_is_text_in_the_csv(tmp_path: Path) -> None:
    make_run(tmp_path / "=1+1", f"{NOISE}=1", accuracies=(-0.5,))
    assert report_command([str(tmp_path / "=1+1"), "--csv", str(tmp_path / "runs.csv")]) == 0
    (row,) = csv.DictReader((tmp_path / "runs.csv").read_text().splitlines())
    assert "'=1+1" in row.values()
    assert row["accuracy"] == "-0.5000"


def test_epsilon_by_every_accountant_is_what_is_published(tmp_path: Path) -> None:
    overrides = (f"{NOISE}=3", "sampling.probability=0.1", "privacy.delta=1e-6")
    run = make_run(tmp_path / "run", *overrides, accuracies=(0.5, 0.6), per_round=256)
    found = epsilons(spent_by_holder(read(run)[0], "user")[""], 1e-6, accountants=ACCOUNTANTS | PRIMIHUB)
    assert found["pld"] == pytest.approx(3.7697, abs=1e-4)
    assert found["rdp"] == pytest.approx(4.0510, abs=1e-4)
    assert found["pld"] < found["rdp"] <= found["rdp, PrimiHub's orders"] < found["rdp, classic conversion"]


def test_a_curve_follows_the_client_that_has_spent_most_by_then(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", *EXAMPLE_ON, accuracies=(0.1, 0.2, 0.3))
    rows = (run.path / "metrics.csv").read_text().replace("inf,inf,inf", "inf,1.5,inf")
    (run.path / "metrics.csv").write_text(rows)
    loud, quiet = GaussianDpEvent(1.0), GaussianDpEvent(2.0)
    charge_clients(run, "example", [(1, "0", loud, 1), (1, "1", quiet, 1), (2, "1", quiet, 5), (3, "1", quiet, 5)])
    curve = epsilon_curves(read(run)[0], "example")["rdp"]
    alone = [epsilons([(event, n)], 1e-3)["rdp"] for event, n in ((loud, 1), (quiet, 6), (quiet, 11))]
    assert curve == list(zip((1.0, 2.0, 3.0), alone, strict=True))
    assert alone == sorted(alone)


def test_laplace_noise_has_a_pure_epsilon_too(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", *LOCAL_ON)
    charge_clients(run, "local", [(1, "0", LaplaceDpEvent(2.0), 3)])
    assert epsilons(spent_by_holder(read(run)[0], "local")["0"], 1e-3)["pure (delta = 0)"] == 1.5


def test_choosing_among_ten_runs_costs_what_is_published(tmp_path: Path) -> None:
    overrides = (f"{NOISE}=1", "sampling.probability=0.01", "privacy.delta=1e-6")
    runs = [make_run(tmp_path / str(n), *overrides, accuracies=(0.5,), per_round=1000) for n in range(10)]
    (cost,) = choice_costs(read(*runs))
    assert (cost.guarantee, cost.num_runs) == ("user", 10)
    assert cost.one_run == pytest.approx(2.437, abs=5e-4)
    assert cost.all_runs == pytest.approx(7.414, abs=5e-4)
    assert cost.drawn == pytest.approx({"logarithmic": 3.851, "geometric": 4.431, "poisson": 4.671}, abs=5e-4)


def test_a_run_without_the_guarantee_over_the_same_clients_makes_all_runs_infinite(tmp_path: Path) -> None:
    paying = [make_run(tmp_path / str(n), f"{NOISE}=1") for n in range(2)]
    plain = [make_run(tmp_path / str(n), *OFF) for n in (2, 3)]
    (cost,) = choice_costs(read(*paying, *plain))
    assert (cost.num_runs, cost.all_runs, cost.drawn) == (4, float("inf"), {})
    assert cost.why_not == "no user-level guarantee in 2 of the runs, which are over the same clients"
    (elsewhere,) = choice_costs(read(*paying, make_run(tmp_path / "4", *OFF, "data.num_clients=30")))
    assert elsewhere.all_runs is None


def test_primihubs_orders_are_of_the_experiment_that_repeats_its_system(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "0", *EXAMPLE_ON), make_run(tmp_path / "1", "experiment=homo_lr_dpsgd")]
    assert [bool({*PRIMIHUB} & {*accountants_of(record)}) for record in read(*runs)] == [False, True]


def test_what_was_swept_is_called_by_the_name_that_was_swept(tmp_path: Path) -> None:
    targets = [make_run(tmp_path / str(t), f"privacy.user.target_epsilon={t}", "rounds=2") for t in (2, 4)]
    assert tried_settings(read(*targets)) == ["privacy.user.target_epsilon"]
    assert swept_line(read(*targets)) == "target_epsilon is privacy.user.target_epsilon"


def test_a_table_fits_a_terminal_of_100_columns_with_name_and_result_first(tmp_path: Path) -> None:
    tried = ("sampling.probability=0.{}", "training.learning_rate=0.{}", "privacy.user.clip.target_quantile=0.{}")
    more = ("training.batch_size={}", "server.momentum=0.{}", "privacy.user.clip.norm={}", "training.epochs={}")
    runs = [
        make_run(tmp_path / str(n), f"{NOISE}={n}", *(word.format(n) for word in (*tried, *more)), accuracies=(n / 9,))
        for n in (1, 2)
    ]
    table = runs_table(read(*runs))
    fitting, left = table.without(table.same).fitting(100)
    assert fitting.columns[:2] == ("run", "accuracy")
    assert (*fitting.columns, *left) == table.without(table.same).columns
    assert left
    console = Console(width=100, record=True, file=io.StringIO())
    show(Report(tuple(read(*runs)), (), ()), console)
    assert all(max(map(len, (name, *cells))) > 2 for name, *cells in zip(fitting.columns, *fitting.rows, strict=True))
    shown = console.export_text()
    assert all(name in shown for name in fitting.columns)


def test_a_baseline_and_a_bar_for_repetitions_are_drawn(tmp_path: Path) -> None:
    for number, (noise, accuracy) in enumerate(((1, 0.6), (1, 0.7), (2, 0.5))):
        make_run(tmp_path / str(number), f"{NOISE}={noise}", f"seed={number}", accuracies=(0.1, accuracy))
    without = {each.title: each for each in report_of([tmp_path]).pictures}
    make_run(tmp_path / "3", *OFF, accuracies=(0.2, 0.9))
    with_baseline = {each.title: each for each in report_of([tmp_path]).pictures}
    for title in ("Accuracy against epsilon: user-level", "Accuracy against noise_multiplier"):
        assert "Dashed: without privacy, 0.9000" in with_baseline[title].note
        assert "Dashed" not in without[title].note
        assert "LineCollection" in without[title].svg


@pytest.mark.parametrize(("last", "ticks"), [(1, [1]), (17, [3, 6, 9, 12, 15, 17])])
def test_the_last_tick_is_the_last_round(last: int, ticks: list[int], tmp_path: Path) -> None:
    make_run(tmp_path / "run", f"{NOISE}=1", f"rounds={last}", accuracies=[0.5] * last)
    svg = report_of([tmp_path]).pictures[0].svg
    labels = re.findall(r">(\d+)</text>", svg)
    assert list(map(int, labels)) == ticks


def test_runs_that_the_server_sees_add_up_and_no_theorem_helps(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(n), *LOCAL_ON) for n in range(2)]
    for run in runs:
        text = (run.path / "metrics.csv").read_text()
        (run.path / "metrics.csv").write_text(text.replace("inf,inf,inf", "inf,inf,0.5"))
        charge_clients(run, "local", [(1, "0", LaplaceDpEvent(2.0), 1)])
    (cost,) = choice_costs(read(*runs))
    assert cost.drawn == {}
    assert "add up" in cost.why_not
    assert cost.all_runs is not None
    assert 0.9 < cost.all_runs <= 1.0  # two pure epsilons of 0.5, at a delta


def test_runs_that_deal_the_data_differently_share_no_cost(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(n), f"{NOISE}=1", f"data.num_clients={n}") for n in (20, 30)]
    (cost,) = choice_costs(read(*runs))
    assert cost.all_runs is None
    assert "deal the data" in cost.why_not
    assert choice_costs(read(runs[0])) == []


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 1)), max_size=12))
def test_the_frontier_is_what_no_other_point_beats(points: list[tuple[float, float]]) -> None:
    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return one[0] <= other[0] and one[1] >= other[1] and one != other

    expected = [i for i, point in enumerate(points) if not any(beats(other, point) for other in points)]
    assert sorted(frontier(points)) == expected


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


def test_what_is_the_same_in_every_run_is_said_once(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(noise), f"{NOISE}={noise}") for noise in (1, 2)]
    table = runs_table(read(*runs))
    assert table.same["delta"] == "0.001"
    assert "noise_multiplier" not in table.same
    assert set(table.without(table.same).columns) == {*table.columns} - {*table.same}
    assert runs_table(read(runs[0])).same == {}


class Page(HTMLParser):
    """Tags, identifiers and where they are used; a tag that closes another one fails."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href") and value]
        if tag not in ("meta", "br", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs")
    for noise in (1, 2, 4):
        make_run(
            folder / f"<{noise}>", f"{NOISE}={noise}", f"privacy.user.clip.norm={noise}", accuracies=(0.3, 0.9 / noise)
        )
    report_of([folder]).write_page(folder / "report.html")
    return (folder / "report.html").read_text()


def test_the_page_is_whole_and_fetches_nothing(html: str) -> None:
    page = Page(html)
    assert page.open == []
    assert not {"script", "link", "img", "iframe"} & {*page.tags}
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"@import|url\((?!#)", html)


def test_pictures_on_one_page_share_no_identifier(html: str) -> None:
    page = Page(html)
    assert page.tags.count("svg") == 6
    assert len(set(page.ids)) == len(page.ids)
    used = {*re.findall(r"url\(#([^)]+)\)", html), *(link[1:] for link in page.links)}
    assert used <= {*page.ids}


def test_pictures_take_their_colours_from_the_page(html: str) -> None:
    assert "#00fe" not in html
    assert "var(--series-2)" in html
    for name in {*re.findall(r"var\((--[\w-]+)\)", html)}:
        assert html.count(f"{name}: #") == 2, name  # once for light, once for dark


def test_the_page_says_what_is_off_and_what_choosing_costs(html: str) -> None:
    assert html.count("none (epsilon = inf)") == 2
    assert "What choosing costs" in html
    assert "The same in every run: epsilon user" in html
    assert "&lt;1&gt;" in html
    assert "<1>" not in html


def test_a_report_of_one_run_lies_in_its_folder_with_its_settings(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", f"{NOISE}=1", "seed=3", ended=False)
    report_of([run.path]).write_page(run.path / "report.html")
    text = (run.path / "report.html").read_text()
    assert "it protects nobody" in text
    assert "had not ended" in text
    assert "privacy.user.clip.target_quantile" in text


def test_pictures_stand_alone_as_well_formed_files(tmp_path: Path) -> None:
    for noise in (1, 2):
        make_run(tmp_path / str(noise), f"{NOISE}={noise}")
    paths = report_of([tmp_path]).write_pictures(tmp_path / "pictures")
    assert "accuracy_after_each_round.svg" in {path.name for path in paths}
    for path in paths:
        root = ElementTree.parse(path).getroot()
        assert root.tag.endswith("svg")
    assert "noise_multiplier 2" in paths[0].read_text()
