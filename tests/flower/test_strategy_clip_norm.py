"""DPFedAvg finds a clip norm that is left out in a few rounds, at no cost; a run that can't learn says so."""

from __future__ import annotations

import logging
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from flwr.app import MetricRecord

from discreet import AdaptiveClipping, PrivateEvaluation
from discreet.server.run_folder import RunFolder
from tests.flower.flower_apps import Nodes, arrays, changed_by, noised, run, strategy


def clipped(norm: float | None = None) -> dict[str, Any]:
    return {"population_size": 60, **noised(clipping=AdaptiveClipping(norm))}


def many(step: float = 0.35) -> Nodes:
    """Nodes whose differences are sqrt(8) times so long."""
    return Nodes(dict.fromkeys(range(1, 61), changed_by(step)))


def rows(folder: Path) -> list[dict[str, Any]]:
    return RunFolder(folder).read_metrics()


def test_each_clip_norm_follows_from_what_was_released(tmp_path: Path) -> None:
    run(tmp_path / "run", many(), num_rounds=6, **clipped())
    found = rows(tmp_path / "run")
    assert found[0]["clip_norm"] == 0.1
    for before, after in pairwise(found):
        miss = before["fraction_below"] - 0.5
        sure = math.copysign(max(0.0, abs(miss) - 2 * max(60 / 20, 2.54) / 60), miss)
        step = 0.2 * miss + 5 / 2 ** (before["round"] - 1) * sure
        assert after["clip_norm"] == pytest.approx(before["clip_norm"] * math.exp(-step), rel=1e-6)


def test_a_run_whose_updates_are_nearly_all_cut_says_so_once_with_what_to_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path / "run", many(), num_rounds=5, **clipped(0.01))
    (said,) = (record for record in caplog.records if "nearly all are cut" in record.message)
    assert said.levelno == logging.WARNING
    assert "in 3 rounds in a row a share below 0.2 of the updates" in said.message
    assert "Begin with a larger clip_norm, such as 0.1" in said.message


@pytest.mark.parametrize(
    ("found", "rating", "unseen"),
    [
        (None, None, True),
        ({"test_acc": 0.5}, None, False),
        ({"f1": 0.5}, None, True),
        (None, PrivateEvaluation(every=1), False),
    ],
)
def test_a_run_that_nobody_evaluates_says_that_nobody_will_see_whether_it_learns(
    found: dict[str, float] | None,
    rating: PrivateEvaluation | None,
    unseen: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = strategy(tmp_path / "run", private_evaluation=rating)
    made.start(Nodes(), arrays(), 2, 0.3, evaluate_fn=None if found is None else lambda *_: MetricRecord(found))
    assert caplog.text.count("nobody will see whether the model learns: give start an evaluate_fn") == unseen
