"""What a round costs a server, fitted: the model finds what was put in, and its errors tell a point that is off."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path

import pytest

from benchmarks.load_model import POLL_SECONDS, Cost, Row, errors, fitted, left_out, main

PLANTED = Cost(second=0.12, node=0.31, million=0.17)
NODES, SIZES = (4, 10, 20, 40), (1e5, 1e6, 5e6)


def made(nodes: float, size: float, *, factor: float = 1.0) -> Row:
    """A round of a server that costs what was planted, times a factor."""
    seconds = 2 + nodes * (0.2 + size / 1e7)
    work = nodes * (PLANTED.node + PLANTED.million * size / 1e6)
    used = factor * (PLANTED.second * seconds + POLL_SECONDS * nodes * seconds / 3 + work)
    parts = {"gate_seconds": 0.2 * used, "link_seconds": 0.7 * used, "app_seconds": 0.1 * used}
    peaks = {"gate_mib": 50 + nodes, "link_mib": 170 + size / 4e4, "app_mib": 330.0}
    return {"nodes": nodes, "parameters": size, "seconds": seconds, "pause": 3.0, **parts, **peaks}


ROWS = [made(*point) for point in itertools.product(NODES, SIZES)]


def test_the_fit_finds_what_was_planted() -> None:
    found = fitted(ROWS)
    assert (found.second, found.node, found.million) == pytest.approx((0.12, 0.31, 0.17))


def test_a_point_that_is_off_is_not_in_the_model_that_says_so() -> None:
    rows = [*ROWS[:-1], made(40, 5e6, factor=2)]
    assert errors(rows, left_out(rows))[-1] == pytest.approx(-0.5)


def test_it_says_what_other_federations_cost_and_draws_the_measured_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, picture, memory = tmp_path / "load.csv", tmp_path / "load.svg", tmp_path / "memory.svg"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["kind", *ROWS[0]])
        writer.writeheader()
        writer.writerows({"kind": "light", **row} for row in ROWS)
    pictures = ("--picture", str(picture), "--memory", str(memory))
    assert main([str(path), *pictures, "--nodes", "100", "--sizes", "1000000"]) == 0
    assert "100 nodes, 1000000 parameters: 48 s of work" in capsys.readouterr().out
    assert "5 million parameters" in picture.read_text()
    assert "MiB" in memory.read_text()
    assert "5 million parameters" in memory.read_text()
