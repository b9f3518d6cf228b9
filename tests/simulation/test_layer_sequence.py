"""Copies of the server's parameters are copies, also when there is one."""

from __future__ import annotations

import pytest
import torch

from discreet.simulation.layer_sequence import layout_of


@pytest.mark.parametrize("count", [1, 2])
def test_training_a_stack_leaves_the_servers_parameters_alone(count: int) -> None:
    layout, params = layout_of([(2, 3), (2,)], [(1, 0), (0,)]), torch.arange(8.0)
    for values in layout.copies(params, count):
        values.add_(1.0)
    assert torch.equal(params, torch.arange(8.0))


def test_rows_are_the_inverse_of_views() -> None:
    layout, rows = layout_of([(2, 3), (2,)], [(1, 0), (0,)]), torch.arange(16.0).view(2, 8)
    assert torch.equal(layout.rows(layout.views(rows)), rows)
