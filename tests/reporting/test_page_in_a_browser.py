"""The report in a real browser, at the width of a phone and of a desk, in both colour schemes:
nothing overflows, no text of a picture is cut off, and a dark page is dark."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from discreet.planning.constant_guess import FILE as CONSTANT
from discreet.reporting.page import report_of
from discreet.run_files.final_results import FILE as TEST_SET
from discreet.run_files.whole_files import write_json
from tests.made_runs import make_run
from tests.reporting.browser import looked_at, needs_browser

pytestmark = pytest.mark.processes

RESULTS = {
    "classes": ["readmitted within thirty days", "not"],
    "confusion": [[90, 10], [8, 2]],
    "calibration": [[0.1, 0.05, 90.0], [0.8, 0.7, 20.0]],
    "roc": [[0.0, 0.0], [0.3, 0.6], [1.0, 1.0]],
}


def write_page(folder: Path, *, runs: int) -> Path:
    """A report of so many runs that differ in three settings."""
    for number in range(runs):
        words = [f"privacy.user.noise_multiplier={1 + number / 8}", f"server.momentum=0.{number}"]
        run = make_run(folder / f"run{number}", *words, f"training.learning_rate=0.{number + 1}")
        rows = [
            row | {"auc": 0.6 + row["round"] / 20, "balanced_accuracy": 0.55}
            for row in run.read_metrics()
        ]
        run.replace_metrics(rows)
        write_json(run.path / CONSTANT, {"share": 0.9, "loss": 0.33, "uneven": True})
        write_json(run.path / TEST_SET, RESULTS)
    report_of([folder]).write_page(folder / "report.html")
    return folder / "report.html"


def luminance(colour: str) -> float:
    """Relative luminance of rgb(...), as WCAG defines it."""
    parts = [int(each) / 255 for each in re.findall(r"\d+", colour)[:3]]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.fixture(scope="module", params=[1, 9], ids=["one_run", "nine_runs"])
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(tmp_path_factory.mktemp("page"), runs=request.param)


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_overflows_or_is_cut_off_and_every_text_can_be_read(
    page: Path, width: int, dark: bool, tmp_path: Path
) -> None:
    said: dict[str, Any] = looked_at(page, tmp_path, width=width, dark=dark)
    assert said["dark"] == dark
    assert (said["width"], said["content"]) == (width, width)
    assert said["cut"] == []
    assert (luminance(said["background"]) < 0.05) == dark
    for ink in (said["ink"], *said["inks"]):
        assert contrast(ink, said["background"]) >= 4.5, ink


def test_every_colour_of_the_page_has_a_dark_one(page: Path) -> None:
    text = page.read_text()
    _, _, dark = text.partition("prefers-color-scheme: dark")
    used = set(re.findall(r"var\(--([0-9a-f]{6})", text))
    assert used <= set(re.findall(r"--([0-9a-f]{6}):", dark))
    assert not re.search(r"[^,] #[0-9a-f]{6}[;\"]", dark.partition("</style>")[2]), (
        "a colour of its own"
    )


def test_loss_auc_and_the_majority_share_are_drawn(page: Path) -> None:
    text = page.read_text()
    titles = ["Accuracy after each round", "AUC after each round", "Loss after each round"]
    single = [
        "Confusion matrix of the model",
        "ROC curve of the model",
        "Calibration of the model",
    ]
    assert all(title in text for title in titles)
    assert all((title in text) == ("<title>9 runs" not in text) for title in single)
    assert "Dotted: the share of the most frequent class, 0.9." in text
    assert "Dotted: what a constant guess has, 0.33." in text


def test_a_run_that_rates_nothing_has_no_score_of_zero(tmp_path: Path) -> None:
    for number in (1, 2):
        words = ["evaluation.kind=none", f"privacy.user.noise_multiplier={number}"]
        run = make_run(tmp_path / f"run{number}", *words)
        run.replace_metrics([row | {"accuracy": None, "loss": None} for row in run.read_metrics()])
    report = report_of([tmp_path])
    assert {row["accuracy"] for row in report.rows} == {""}
    assert not any(
        "ccuracy" in picture.title or "Loss" in picture.title for picture in report.pictures
    )
