"""Every model of the project can be clipped example by example."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from discreet.models.models import MODELS, build_model
from discreet.per_example.objective import cross_entropy
from discreet.per_example.per_example import clipped_gradient_sum

CLIP = 0.5
IMAGES = {name: (1, 28, 28) for name in MODELS if name != "lstm"}
SHAPES = [*IMAGES.items(), ("cnn", (1, 8, 8)), ("cnn", (3, 32, 32)), ("lstm", (80,))]


def looped(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The oracle: one backward pass for each example."""
    total = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
    for one, target in zip(inputs, targets, strict=True):
        loss = cross_entropy(model(one.unsqueeze(0)), target.unsqueeze(0)).sum()
        gradient = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])
        total += gradient * min(1.0, CLIP / gradient.norm().item())
    return total


@pytest.mark.parametrize(("name", "shape"), SHAPES, ids=str)
def test_clipped_sums_equal_a_loop_of_single_backward_passes(name: str, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(7151)
    classes = 98 if name == "lstm" else 10
    model = build_model(name, shape, classes, seed=419)
    inputs = torch.randn(5, *shape, generator=generator)
    if name == "lstm":
        inputs = torch.randint(2, classes, (5, *shape), generator=generator)
    targets = torch.randint(0, classes, (5,), generator=generator)
    total, norms = clipped_gradient_sum(model, inputs, targets=targets, clip_norm=CLIP)
    assert torch.allclose(total, looped(model, inputs, targets), atol=1e-5, rtol=1e-4)
    assert norms.shape == (5,)
