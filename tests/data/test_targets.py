"""What is predicted: classes, labels or numbers, and how each is read."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from discreet.data.targets import CLASS, LABELS, NUMBERS, FolderError, Target, targets_of

PRICE = Target(NUMBERS, ("price", "rent"), (0.0, 10.0), (200.0, 20.0))
TOPICS = Target(LABELS, ("sport", "art"))


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


@pytest.mark.parametrize(
    ("target", "values", "said"),
    [
        (PRICE, [[1.0, np.nan]], "row 0: rent is missing or not finite"),
        (TOPICS, [[0, 1], [1, 2]], "row 1: art is not 0 or 1"),
        (TOPICS, [1, 0], "targets must be 2 numbers a row: sport, art"),
        (CLASS, [0, 3], "row 1: the class is not one of 0 to 2"),
        (CLASS, [[0, 1]], "targets must be one number a row"),
    ],
)
def test_a_target_that_is_none_is_named(target: Target, values: object, said: str) -> None:
    with pytest.raises(FolderError, match=said):
        read(values, target)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("words",), "kind must be one of"),
        ((LABELS,), "names must be given for labels and numbers"),
        ((NUMBERS, ("a",)), "low and high must be 1 numbers"),
        ((NUMBERS, ("a",), (1.0,), (1.0,)), "high must be above low"),
    ],
)
def test_a_target_checks_itself(arguments: tuple[object, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Target(*arguments)  # type: ignore[arg-type]
