"""A cohort that is added up in parts is the cohort added up at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from discreet.mechanisms.sums import CohortSum
from discreet.privacy.grid import Grid

GRIDS = [None, Grid(2.0**-20)]
ROWS = torch.randn(7, 5, generator=torch.Generator().manual_seed(8101))
BITS = torch.tensor([True, False, True, True, False, True, True])


def sum_of(grid: Grid | None, rows: slice) -> CohortSum:
    total = CohortSum(5, 1.5, grid)
    total.add(ROWS[rows], BITS[rows])
    return total


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("cut", [0, 3, 7])
def test_parts_make_the_whole(grid: Grid | None, cut: int) -> None:
    whole, total = sum_of(grid, slice(7)).part(), CohortSum(5, 1.5, grid)
    for rows in (slice(cut), slice(cut, 7)):
        total.take(sum_of(grid, rows).part())
    part = total.part()
    assert (part.below, part.replies) == (whole.below, whole.replies) == (3, 7)
    torch.testing.assert_close(part.values, whole.values, rtol=0, atol=0 if grid else 1e-14)


def test_a_part_that_was_clipped_otherwise_is_refused() -> None:
    total, part = sum_of(None, slice(2)), sum_of(None, slice(2)).part()
    for other in (
        replace(part, clip_norm=2.0),
        replace(part, grid=Grid(1.0)),
        replace(part, values=part.values[:4]),
        replace(part, values=part.values.float()),
        sum_of(Grid(2.0**-20), slice(2)).part(),
    ):
        with pytest.raises(ValueError, match="a part must have the clip norm"):
            total.take(other)
    assert total.replies == 2
