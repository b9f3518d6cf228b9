"""The sentences of a report on runs of several kinds say no more than holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from discreet.planning.constant_guess import FILE as CONSTANT
from discreet.reporting.page import report_of
from discreet.reporting.records import repetitions_table
from discreet.reporting.svg_style import Picture
from discreet.run_files.run_folder import RunFolder
from discreet.run_files.whole_files import write_json
from discreet.server.population_account import ADJACENCIES, Population, create_account
from tests.made_runs import ENDED, make_run

NOISE = "privacy.user.noise_multiplier=2"
RATED = ("evaluation.kind=private", "evaluation.every=1", "evaluation.metrics=[accuracy,loss]")
GUESS = {"share": 0.9, "loss": 2.302, "uneven": False}


def page_of(folder: Path) -> str:
    report_of([folder]).write_page(folder / "report.html")
    return (folder / "report.html").read_text()


def picture_of(folder: Path, title: str) -> Picture:
    (found,) = (each for each in report_of([folder]).pictures if each.title.startswith(title))
    return found


def make_rated(path: Path, *words: str) -> RunFolder:
    """A run whose clients rate each round: accuracy 0.5, loss 2.376, both with standard errors."""
    folder = make_run(path, NOISE, *RATED, *words)
    said = {"accuracy": 0.5, "accuracy_error": 0.05, "loss": 2.376, "loss_error": 0.1}
    folder.replace_metrics([row | said for row in folder.read_metrics()])
    write_json(folder.path / CONSTANT, GUESS)
    return folder


@pytest.mark.parametrize("kinds", [("everyone", "poisson"), ("poisson", "everyone")])
def test_a_card_of_several_runs_names_what_any_of_them_does_not_cover(
    kinds: Sequence[str], tmp_path: Path
) -> None:
    for number, kind in enumerate(kinds):
        make_run(tmp_path / str(number), NOISE, f"sampling.kind={kind}")
    page = page_of(tmp_path)
    assert page.count("amplification by sampling, towards an observer") == 1
    assert page.count("earlier runs over the same clients: each run has its own ledger") == 1


def test_a_card_says_of_runs_with_and_without_an_account_what_each_leaves_out(
    tmp_path: Path,
) -> None:
    path = tmp_path / "people.db"
    create_account(path, Population("people", 20, ADJACENCIES[0], 1e-3))
    account = (f"privacy.user.account={path}", "sampling.population_name=people")
    words = ("data.num_clients=20", NOISE, "sampling.kind=everyone")
    make_run(tmp_path / "runs" / "0", *words, *account)
    make_run(tmp_path / "runs" / "1", *words)
    page = page_of(tmp_path / "runs")
    assert "runs over the same clients that did not charge the population" in page
    assert "earlier runs over the same clients: each run has its own ledger" in page


@pytest.mark.parametrize("runs", [1, 2])
def test_what_clients_answered_is_not_compared_to_a_guess_on_the_test_set(
    runs: int, tmp_path: Path
) -> None:
    for number in range(runs):
        make_rated(tmp_path / str(number), f"seed={number}")
    page = page_of(tmp_path)
    assert "a constant guess" not in page
    assert "is not above the share" not in page
    loss = picture_of(tmp_path, "Loss")
    assert "loss, by clients" in loss.svg
    assert "public test set" not in loss.svg
    assert "most frequent class" not in picture_of(tmp_path, "Accuracy after").note


def test_an_axis_of_runs_rated_in_both_ways_says_so(tmp_path: Path) -> None:
    make_rated(tmp_path / "0")
    write_json(make_run(tmp_path / "1", NOISE).path / CONSTANT, GUESS)
    assert "loss, test set or clients" in picture_of(tmp_path, "Loss").svg
    assert "accuracy, test set or clients" in picture_of(tmp_path, "Accuracy after").svg


def test_runs_on_other_data_are_no_repetitions(tmp_path: Path) -> None:
    def rows(word: str) -> int:
        for number in range(2):
            make_run(tmp_path / word / str(number), NOISE, f"{word}={number}")
        return len(repetitions_table(report_of([tmp_path / word]).records))

    assert (rows("data.path"), rows("seed")) == (0, 1)


def bars(picture: Picture) -> int:
    return picture.svg.count("LineCollection")


def test_bars_are_drawn_where_the_words_promise_them(tmp_path: Path) -> None:
    for noise in (1, 2):
        for seed in range(2):
            words = (f"privacy.user.noise_multiplier={noise}", f"seed={seed}")
            make_run(tmp_path / f"{noise}{seed}", *words, accuracies=(0.2, 0.5 + seed / 10))
    lines = picture_of(tmp_path, "Accuracy after")
    assert bars(lines) == 0
    assert "bars" not in lines.note.lower()
    assert "Lines are means over runs that differ" in lines.note
    points = picture_of(tmp_path, "Accuracy against")
    assert bars(points) == 2
    assert "Bars are one standard deviation" in points.note


@pytest.mark.parametrize("noises", [(1,), (1, 2)])
def test_each_run_that_clients_rated_has_its_bars(noises: Sequence[int], tmp_path: Path) -> None:
    for noise in noises:
        make_rated(tmp_path / str(noise), f"sampling.probability=0.{noise}")
    shown = picture_of(tmp_path, "Accuracy after")
    assert bars(shown) == len(noises)
    assert "Bars are one standard error of what clients said" in shown.note
    make_rated(tmp_path / "again", f"sampling.probability=0.{noises[0]}", "seed=7")
    assert bars(picture_of(tmp_path, "Accuracy after")) == len(noises) - 1


@pytest.mark.parametrize(("rounds", "of_round"), [(2, 2), (1, 1), (2, 0)])
def test_the_round_that_was_kept_is_that_of_the_lowest_loss(
    rounds: int, of_round: int, tmp_path: Path
) -> None:
    accuracies = (0.3, 0.4)[:rounds]
    run = make_run(tmp_path / "run", NOISE, "evaluation.keep=best", accuracies=accuracies)
    write_json(run.path / "privacy.json", ENDED | {"model_round": of_round})
    said = "The model is that of round 2, which has the lowest loss of 2 on the public test set"
    assert (said in page_of(tmp_path)) == (of_round == 2)
    assert ("The model is that of round" in page_of(tmp_path)) == (of_round == 2)


def test_each_picture_of_repeated_runs_says_that_its_lines_are_means(tmp_path: Path) -> None:
    clip = "privacy.user.clip.kind=adaptive"
    make_run(tmp_path / "0", NOISE, clip)
    titles = ("Accuracy after", "Loss after", "Clip norm")
    assert not [each for each in titles if "are means" in picture_of(tmp_path, each).note]
    make_run(tmp_path / "1", NOISE, clip, "seed=4")
    assert all("are means" in picture_of(tmp_path, each).note for each in titles)


def test_one_run_is_spoken_of_as_one(tmp_path: Path) -> None:
    off = ("privacy.user.enabled=false", "privacy.user.target_epsilon=null", "seed=3")
    make_run(tmp_path / "0", *off, ended=False)
    page = page_of(tmp_path)
    assert "1 of 1" not in page
    assert "drawn from a seed" not in page  # it has no noise
    assert "This run has no guarantee at all: it is not private." in page
    assert "This run had not ended when this was written." in page
    make_run(tmp_path / "1", NOISE)
    page = page_of(tmp_path)
    assert "1 of 2 runs has no guarantee at all: it is not private." in page
    assert "1 of 2 runs had not ended" in page
    make_run(tmp_path / "2", *off)
    assert "2 of 3 runs have no guarantee at all: they are not private." in page_of(tmp_path)
    make_run(tmp_path / "3", NOISE, "seed=4")
    assert "The noise of 1 of 4 runs was drawn from a seed" in page_of(tmp_path)


def test_a_run_whose_noise_is_zero_has_no_guarantee(tmp_path: Path) -> None:
    make_run(tmp_path / "0", "privacy.user.noise_multiplier=0", "privacy.user.target_epsilon=null")
    assert "This run has no guarantee at all: it is not private." in page_of(tmp_path)
    assert report_of([tmp_path]).rows[0]["noise"] == "none"
