"""roc.csv of a run folder."""

from __future__ import annotations

from pathlib import Path

from discreet.evaluation.roc import RocPoint, write_roc

FIRST, SECOND = (RocPoint("class 1", score, 0.25, 0.5, 0.125, 0.0625) for score in (0.5, 0.0))


def test_a_model_that_is_rated_again_has_one_curve(tmp_path: Path) -> None:
    for number, points in ((2, [FIRST]), (4, [SECOND]), (2, [FIRST, SECOND])):
        write_roc(tmp_path, number, points)
    rows = [line.split(",") for line in (tmp_path / "roc.csv").read_text().splitlines()]
    assert rows[0][:3] == ["round", "of", "score"]
    assert [row[:3] for row in rows[1:]] == [["4", "class 1", "0.0"], ["2", "class 1", "0.5"], ["2", "class 1", "0.0"]]


def test_a_run_without_curves_has_no_file(tmp_path: Path) -> None:
    write_roc(tmp_path, 2, [])
    assert list(tmp_path.iterdir()) == []
