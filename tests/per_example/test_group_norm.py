"""Group normalisation in channels last: PyTorch's outputs and gradients, by sums that are taken
once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from discreet.layers import group_normalisation
from discreet.per_example.per_example import clipped_gradient_sum
from tests.per_example.test_per_example_choice import seeded
from tests.per_example.test_per_example_oracle import assert_matches

TARGETS = torch.tensor([0, 1, 2, 1])


def network(affine: bool, groups: int) -> nn.Module:
    layers = [nn.Conv2d(2, 8, 3), nn.GroupNorm(groups, 8, affine=affine), nn.ReLU(inplace=True)]
    again = [nn.Conv2d(8, 8, 3), nn.GroupNorm(groups, 8), nn.AdaptiveAvgPool2d(2)]
    return nn.Sequential(*layers, *again, nn.Flatten(), nn.Linear(32, 3))


def images() -> torch.Tensor:
    return 3 + 2 * torch.randn(4, 2, 9, 8, generator=torch.Generator().manual_seed(5087))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("order", [1, 2])
def test_gradients_are_those_of_plain_autograd(affine: bool, groups: int, order: int) -> None:
    for clip in (0.01, 100.0):
        model = seeded(lambda: network(affine, groups))
        assert_matches(model, images(), TARGETS, clip=clip, order=order)


def test_the_sums_of_a_layer_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = list[bool]()
    real = group_normalisation.Normal.sums

    def noted(self: group_normalisation.Normal, *given: torch.Tensor) -> object:
        taken.append(self.found is None)
        return real(self, *given)

    model = seeded(lambda: network(True, 2))
    clipped_gradient_sum(model, images(), targets=TARGETS, clip_norm=1.0)  # and its trial
    monkeypatch.setattr(group_normalisation.Normal, "sums", noted)
    clipped_gradient_sum(model, images(), targets=TARGETS, clip_norm=1.0)
    assert taken.count(True) == 2  # of two layers
    assert taken.count(False) == 2
