"""roc.csv of a run folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from discreet.federated.roc import RocPoint, read_roc, write_roc
from discreet.settings.rules import ConfigError

FIRST, SECOND = (RocPoint("class 1", score, 0.25, 0.5, 0.125, 0.0625) for score in (0.5, 0.0))


def test_curves_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_roc(tmp_path, 2, [FIRST, SECOND])
    write_roc(tmp_path, 4, [SECOND])
    assert read_roc(tmp_path) == [(2, FIRST), (2, SECOND), (4, SECOND)]


def test_a_model_that_is_rated_again_has_one_curve(tmp_path: Path) -> None:
    write_roc(tmp_path, 2, [FIRST])
    write_roc(tmp_path, 2, [SECOND])
    assert read_roc(tmp_path) == [(2, SECOND)]


def test_a_run_without_curves_has_no_file(tmp_path: Path) -> None:
    write_roc(tmp_path, 2, [])
    assert list(tmp_path.iterdir()) == []
    assert read_roc(tmp_path) == []


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "round\n1\n"], ids=["empty", "other columns", "cut"])
def test_a_damaged_file_is_said(text: str, tmp_path: Path) -> None:
    (tmp_path / "roc.csv").write_text(text)
    with pytest.raises(ConfigError, match=r"roc\.csv is damaged"):
        read_roc(tmp_path)
