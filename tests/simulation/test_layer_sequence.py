"""Copies of the server's parameters are copies, also when there is one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from discreet.simulation.layer_sequence import layout_of, sequence_of
from discreet.tasks.models import token_lstm


@pytest.mark.parametrize("count", [1, 2])
def test_training_a_stack_leaves_the_servers_parameters_alone(count: int) -> None:
    layout, params = layout_of([((2, 3), (1, 0)), ((2,), (0,))]), torch.arange(8.0)
    for values in layout.copies(params, count):
        values.add_(1.0)
    assert torch.equal(params, torch.arange(8.0))


def test_rows_are_the_inverse_of_views() -> None:
    layout, rows = layout_of([((2, 3), (1, 0)), ((2,), (0,))]), torch.arange(16.0).view(2, 8)
    assert torch.equal(layout.rows(layout.views(rows)), rows)


@pytest.mark.parametrize("words", [{"max_norm": 0.5}, {"padding_idx": 0}, {"scale_grad_by_freq": True}])
def test_a_table_whose_rows_or_gradients_are_not_plain_is_no_part_of_a_batched_model(words: dict[str, float]) -> None:
    model = token_lstm(7, 3, widths=(4, 5))
    assert sequence_of(model, (6,)) is not None
    model.embedding = nn.Embedding(7, 4, **words)  # type: ignore[arg-type]
    assert sequence_of(model, (6,)) is None
