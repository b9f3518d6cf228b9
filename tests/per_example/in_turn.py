"""Clipped sums by one pass for each example, alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from discreet.per_example.in_turn import gradients_in_turn


def sequential_sum(model: nn.Module, inputs: Any, **how: Any) -> Tensor:
    """The total of `gradients_in_turn`, (num_params,)."""
    return torch.stack([gradient() for gradient in gradients_in_turn(model, inputs, **how)]).sum(0)
