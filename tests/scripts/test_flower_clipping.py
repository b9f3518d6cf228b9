"""Flower's own adaptive clipping beside ours: the comparison runs, and shows which way each clip norm goes."""

from __future__ import annotations

import csv
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from benchmarks.flower_clipping import COLUMNS, main


@pytest.mark.slow
def test_flower_runs_away_from_the_quantile_and_ours_goes_towards_it(tmp_path: Path) -> None:
    # First norms far below and far above every update: four rounds move log C by 0.4, give or take 0.02 from the noise
    # on the counts, so that a false alarm is 20 standard deviations away.
    files = ["--out", str(tmp_path / "rows.csv"), "--picture", str(tmp_path / "norms.svg")]
    assert main(["rounds=4", "training.learning_rate=0.5", *files]) == 0
    rows = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    assert tuple(rows[0]) == COLUMNS
    last = {(row["strategy"], row["first_norm"]): float(row["clip_norm"]) for row in rows if row["round"] == "4"}
    assert last["discreet", "0.1"] > 0.1 > last["flower", "0.1"]
    assert last["discreet", "10.0"] < 10 < last["flower", "10.0"]
    assert ElementTree.parse(tmp_path / "norms.svg").getroot().tag.endswith("svg")
