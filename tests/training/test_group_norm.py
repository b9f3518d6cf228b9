"""A network with BatchNorm becomes one that trains per example: `to_group_norm`, on ResNets like torchvision's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from discreet.privacy.per_example import clipped_gradient_sum
from discreet.training.group_norm import to_group_norm

IMAGES = (3, 3, 16, 16)


def conv(inner: int, outer: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inner, outer, size, stride=stride, padding=size // 2, bias=False)


def downsample(inner: int, outer: int, stride: int) -> nn.Module | None:
    if stride == 1 and inner == outer:
        return None
    return nn.Sequential(conv(inner, outer, 1, stride), nn.BatchNorm2d(outer))


class BasicBlock(nn.Module):
    """Two convolutions and a way around them, with torchvision's names."""

    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(inner, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3), nn.BatchNorm2d(width)
        self.relu, self.downsample = nn.ReLU(inplace=True), downsample(inner, width, stride)

    def forward(self, inputs: Tensor) -> Tensor:
        around = inputs if self.downsample is None else self.downsample(inputs)
        outputs = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(inputs)))))
        return self.relu(outputs + around)  # type: ignore[no-any-return]


def resnet(width: int = 8, seed: int = 60427) -> nn.Module:
    """A ResNet of two stages, its BatchNorms with weights, biases and statistics as after training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        stages = [BasicBlock(width, width, 1), BasicBlock(width, 2 * width, 2)]
        head = nn.Linear(2 * width, 10)
        stem = [conv(3, width, 7, 2), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        model = nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
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
        clipped_gradient_sum(resnet(), inputs, targets=targets, l2_norm_clip=0.5)
    total, norms = clipped_gradient_sum(model, inputs, targets=targets, l2_norm_clip=0.5)
    each = torch.zeros_like(total)
    for one, target in zip(inputs.split(1), targets.split(1), strict=True):
        loss = nn.functional.cross_entropy(model(one), target)
        gradient = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])
        each += gradient * min(1.0, 0.5 / float(gradient.norm()))
    assert float(norms.min()) > 0.5
    torch.testing.assert_close(total, each, rtol=1e-4, atol=1e-5)


def test_weights_and_names_of_parameters_are_kept() -> None:
    plain = resnet()
    nn.init.zeros_(next(to_group_norm(plain).parameters()))
    torch.testing.assert_close(plain.state_dict(), resnet().state_dict())
    before, after = dict(plain.named_parameters()), dict(to_group_norm(plain).named_parameters())
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert list(to_group_norm(nn.Sequential(plain, nn.InstanceNorm2d(4, track_running_stats=True))).buffers()) == []


@pytest.mark.parametrize(
    ("layer", "groups"),
    [
        (nn.BatchNorm2d(64), 32),
        (nn.BatchNorm3d(24), 8),
        (nn.BatchNorm2d(3), 1),
        (nn.BatchNorm1d(64), 1),  # with one channel a group each number would be normalised by itself
    ],
)
def test_groups_divide_the_channels(layer: nn.Module, groups: int) -> None:
    changed = to_group_norm(layer)
    assert isinstance(changed, nn.GroupNorm)
    assert changed.num_groups == groups


@pytest.mark.parametrize(
    ("make", "groups", "wrong"),
    [
        (lambda: nn.BatchNorm2d(4), 0, r"^groups must be at least 1 \(got 0\)$"),
        (
            lambda: nn.Sequential(nn.LazyBatchNorm2d()),
            32,
            r"^0 \(LazyBatchNorm2d\) has no channels yet: call the model",
        ),
        (lambda: nn.Sequential(nn.BatchNorm1d(1)), 32, "^0 is a BatchNorm1d of one channel"),
    ],
)
def test_what_can_not_be_converted_is_named(make: Callable[[], nn.Module], groups: int, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        to_group_norm(make(), groups)
