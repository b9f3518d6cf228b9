"""Indicators of predictions against numbers counted by hand."""

from __future__ import annotations

import math

import pytest
import torch

from discreet.run_files.indicators import class_indicators


def test_indicators_are_those_counted_by_hand() -> None:
    targets, scores = (
        torch.tensor([1, 1, 1, 0, 0]),
        torch.tensor([0.9, 0.8, 0.3, 0.6, 0.1], dtype=torch.float64),
    )
    found = class_indicators(torch.stack([1 - scores, scores], dim=1), targets)
    # Of the 3 * 2 pairs of a positive and a negative, one is in the wrong order: 0.3 below 0.6.
    assert found["auc"] == pytest.approx(5 / 6)
    # Above 0.8 lie two of three positives and no negative.
    assert found["ks"] == pytest.approx(2 / 3)
    assert found["accuracy"] == pytest.approx(3 / 5)
    assert found["precision"] == found["recall"] == found["f1"] == pytest.approx(2 / 3)
    expected = -sum(math.log(p) for p in (0.9, 0.8, 0.3, 0.4, 0.9)) / 5
    assert found["loss"] == pytest.approx(expected)
