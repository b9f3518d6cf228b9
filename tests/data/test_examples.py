"""Examples and Task check themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from discreet.data.examples import Examples, Task, TaskShape, to_unit_box


def table(n: int, num_classes: int = 2) -> Examples:
    return Examples(torch.zeros(n, 3), torch.arange(n) % num_classes)


def test_a_subset_keeps_the_asked_order_and_is_a_copy() -> None:
    whole = Examples(torch.arange(4.0).reshape(4, 1), torch.tensor([0, 1, 2, 3]))
    part = whole.subset(torch.tensor([3, 1]))
    part.inputs.zero_()
    assert part.targets.tolist() == [3, 1]
    assert whole.inputs.flatten().tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [
        (torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64)),
        (torch.zeros(2, 3), torch.zeros(2)),
        (torch.zeros(2, 3), torch.zeros(2, 1, 1, dtype=torch.int64)),
        (torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)),
    ],
)
def test_examples_that_do_not_fit_are_refused(inputs: torch.Tensor, targets: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"inputs|targets"):
        Examples(inputs, targets)


@pytest.mark.parametrize(
    ("train", "test", "shape", "message"),
    [
        (4, table(3, num_classes=3), (3,), r"named: test targets lie in \[0, 2\]"),
        (4, table(4), (4,), r"named: train inputs have shape \(3,\), not \(4,\)"),
        (0, table(4), (3,), "named: the train set is empty"),
    ],
)
def test_a_task_that_does_not_fit_is_refused(train: int, test: Examples, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Task("named", table(train), test, shape=TaskShape(shape, 2))


def test_scaling_maps_each_public_range_to_the_ends_clamps_outside_and_depends_on_no_other_row() -> None:
    ranges = ((20.0, 90.0), (-1.0, 1.0))
    low, high = np.array(ranges).T
    rows = np.stack([low - 1, low, (low + high) / 2, high, high * 3])
    scaled = to_unit_box(rows, ranges)
    assert np.allclose(scaled, np.array([-1, -1, 0, 1, 1])[:, None])
    assert np.array_equal(scaled, np.concatenate([to_unit_box(row[None], ranges) for row in rows]))
