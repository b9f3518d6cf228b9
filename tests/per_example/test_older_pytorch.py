"""A PyTorch before 2.13 has no `redispatch_function`: functions written in Python are called by
copies of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from discreet.layers import functions
from discreet.per_example.per_example import clipped_gradient_sum


class Words(nn.Module):
    """Functions of PyTorch that are written in Python: embedding, layer norm, dropout, GELU, cross
    entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.exit = nn.Embedding(7, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = functional.gelu(self.norm(self.words(ids)))
        logits: torch.Tensor = self.exit(functional.dropout(found, 0.0).mean(1))
        return logits


def test_a_clipped_sum_is_the_same_without_redispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(31607)
    model, ids, classes = Words(), torch.randint(7, (5, 4)), torch.tensor([0, 1, 2, 1, 0])
    with_it, norms = clipped_gradient_sum(model, ids, targets=classes, clip_norm=0.5)
    monkeypatch.setattr(functions, "redispatch", None)
    without_it, others = clipped_gradient_sum(model, ids, targets=classes, clip_norm=0.5)
    torch.testing.assert_close(without_it, with_it)
    torch.testing.assert_close(others, norms)
    assert functions.undispatched.cache_info().currsize > 0
