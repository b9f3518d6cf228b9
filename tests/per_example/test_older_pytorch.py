"""Other PyTorch than the one that is installed: before 2.13 it has no `redispatch_function`, and
functions written in Python are called by copies of them; from 2.15 on `Function.apply` is in C."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
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


class Cubed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> Tensor:
        found: Tensor = 3 * grads * ctx.saved_tensors[0] ** 2
        return found


class OfCubes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.exit = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.exit(Cubed.apply(self.first(x)))  # type: ignore[no-untyped-call]
        return found


def test_a_derivative_of_its_own_runs_side_by_side_where_apply_is_in_c(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(31607)
    model, inputs, classes = OfCubes(), torch.randn(5, 4), torch.tensor([0, 1, 2, 1, 0])
    wanted, norms = clipped_gradient_sum(model, inputs, targets=classes, clip_norm=0.5)
    monkeypatch.setattr(Function, "apply", vars(torch._C._FunctionBase)["apply"])
    with caplog.at_level(logging.INFO, logger="discreet"):
        found, others = clipped_gradient_sum(model, inputs, targets=classes, clip_norm=0.5)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(others, norms)
    assert not caplog.records
