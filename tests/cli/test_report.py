"""The report's command line."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.command import report as main
from tests.made_runs import make_run

NOISE = "privacy.user.noise_multiplier"


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    for number, noise in enumerate((1, 2)):
        make_run(tmp_path / "sweep" / str(number), f"{NOISE}={noise}", accuracies=(0.4, 0.8 - noise / 10))
    return tmp_path / "sweep"


def test_a_sweep_becomes_a_page_a_table_and_pictures(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(sweep), "--csv", str(sweep / "runs.csv"), "--pictures", str(sweep / "pictures")]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "0.6000" in printed
    assert "choosing the best: epsilon" in printed
    assert (sweep / "report.html").read_text().startswith("<!doctype html>")
    rows = list(csv.DictReader((sweep / "runs.csv").read_text().splitlines()))
    assert [row["accuracy"] for row in rows] == ["0.7000", "0.6000"]
    assert list((sweep / "pictures").glob("*.svg"))
