"""A network with BatchNorm becomes one that trains per example: `to_group_norm`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from discreet.data.examples import Examples
from discreet.per_example.per_example import clipped_gradient_sum
from discreet.training.group_norm import to_group_norm
from tests.node.clients import clipped, gradients

IMAGES = (3, 3, 16, 16)


def resnet() -> nn.Module:
    """A stem and a stage of a ResNet, its BatchNorms with weights, biases and statistics as after training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(60427)
        stem = [nn.Conv2d(3, 8, 7, 2, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        stage = [nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
        model = nn.Sequential(*stem, *stage, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                nn.init.normal_(layer.weight, 1.0, 0.2)
                nn.init.normal_(layer.bias)
    return model


def images() -> Tensor:
    return torch.randn(IMAGES, generator=torch.Generator().manual_seed(8123))


def test_no_example_of_a_converted_resnet_changes_the_outputs_of_another() -> None:
    plain, model = resnet(), to_group_norm(resnet())
    for network, mixes in ((plain, True), (model, False)):
        alone = torch.cat([network(one) for one in images().flip(0).split(1)]).flip(0)
        assert torch.allclose(network(images()), alone, atol=1e-5) is not mixes


def test_a_converted_resnet_trains_per_example() -> None:
    model, inputs, targets = to_group_norm(resnet()), images(), torch.tensor([1, 4, 7])
    with pytest.raises(ValueError, match="BatchNorm"):
        clipped_gradient_sum(resnet(), inputs, targets=targets, clip_norm=0.5)
    total, norms = clipped_gradient_sum(model, inputs, targets=targets, clip_norm=0.5)
    each = gradients(model, Examples(inputs, targets))
    assert float(norms.min()) > 0.5
    torch.testing.assert_close(total, clipped(each, 0.5), rtol=1e-4, atol=1e-5)
