"""A custom model, chosen by `model.name=examples.own.model:build`."""

from __future__ import annotations

import math

from torch import nn


def build(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Maps inputs (n, *input_shape) to logits (n, num_classes). No BatchNorm."""
    width = math.prod(input_shape)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(width, 16),
        nn.GroupNorm(4, 16),
        nn.Tanh(),
        nn.Linear(16, num_classes),
    )
