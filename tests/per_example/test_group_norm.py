"""Group normalisation of all examples: PyTorch's outputs and gradients, in channels last and not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.per_example.call_counts import as_on
from tests.per_example.test_per_example_choice import seeded
from tests.per_example.test_per_example_oracle import assert_matches

TARGETS = torch.tensor([0, 1, 2, 1])


def network(affine: bool, groups: int) -> nn.Module:
    layers = [nn.Conv2d(2, 8, 3), nn.GroupNorm(groups, 8, affine=affine), nn.ReLU(inplace=True)]
    again = [nn.Conv2d(8, 8, 3), nn.GroupNorm(groups, 8), nn.AdaptiveAvgPool2d(2)]
    return nn.Sequential(*layers, *again, nn.Flatten(), nn.Linear(32, 3))


def images() -> torch.Tensor:
    return 3 + 2 * torch.randn(4, 2, 9, 8, generator=torch.Generator().manual_seed(5087))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("order", [1, 2])
def test_gradients_are_those_of_plain_autograd(
    device: str, affine: bool, groups: int, order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on(device, monkeypatch)
    for clip in (0.01, 100.0):
        model = seeded(lambda: network(affine, groups))
        assert_matches(model, images(), TARGETS, clip=clip, order=order)
