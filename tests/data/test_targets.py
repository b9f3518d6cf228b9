"""What is predicted: classes, labels or numbers, and how each is read."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from discreet.data.examples import to_unit_box
from discreet.data.targets import NUMBERS, Target, targets_of

PRICE = Target(NUMBERS, ("price", "rent"), (0.0, 10.0), (200.0, 20.0))


def read(values: object, target: Target) -> torch.Tensor:
    return targets_of(np.asarray(values), target, num_classes=3, what="table.csv")


def test_numbers_are_scaled_by_their_public_ranges_and_back() -> None:
    given = [[50.0, 15.0], [200.0, 10.0]]
    scaled = read(given, PRICE)
    assert scaled.tolist() == [[-0.5, 0.0], [1.0, -1.0]]
    assert PRICE.in_units(scaled).tolist() == given


def test_how_far_a_number_lies_outside_its_range_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        near, far = read([[201.0, 9.0]], PRICE), read([[1e9, -1e9]], PRICE)
    assert torch.equal(near, far)
    assert "2 of 2 targets lie outside target_low..target_high" in caplog.text


def test_scaling_maps_each_public_range_to_the_ends_clamps_outside_and_depends_on_no_other_row() -> None:
    ranges = ((20.0, 90.0), (-1.0, 1.0))
    low, high = np.array(ranges).T
    rows = np.stack([low - 1, low, (low + high) / 2, high, high * 3])
    scaled = to_unit_box(rows, ranges)
    assert np.allclose(scaled, np.array([-1, -1, 0, 1, 1])[:, None])
    assert np.array_equal(scaled, np.concatenate([to_unit_box(row[None], ranges) for row in rows]))
