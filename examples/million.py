"""A custom model, `model.name=examples.million:million`: a perceptron with a million parameters."""

from __future__ import annotations

import math

from torch import nn

PARAMETERS = 1_000_000


def million(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Maps inputs (n, *input_shape) to logits (n, num_classes); as wide as a million parameters
    allow."""
    inputs = math.prod(input_shape)
    width = (PARAMETERS - num_classes) // (inputs + 1 + num_classes)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, num_classes)
    )
