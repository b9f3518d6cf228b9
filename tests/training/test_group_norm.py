"""A network with BatchNorm becomes one that trains per example: `to_group_norm`."""

from __future__ import annotations

from collections.abc import Callable

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


def test_weights_and_names_of_parameters_are_kept_and_the_model_that_is_given_stays_as_it_is() -> None:
    plain = resnet()
    changed = to_group_norm(plain)
    torch.testing.assert_close(dict(changed.named_parameters()), dict(plain.named_parameters()))
    assert list(changed.buffers()) == []
    nn.init.zeros_(next(changed.parameters()))
    torch.testing.assert_close(plain.state_dict(), resnet().state_dict())
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in plain.modules()) == 2


@pytest.mark.parametrize(
    ("layer", "groups"),
    [
        (nn.BatchNorm2d(64), 32),
        (nn.BatchNorm3d(24), 8),
        (nn.BatchNorm2d(3), 1),
        (nn.SyncBatchNorm(48), 16),
        (nn.BatchNorm1d(64), 1),
    ],
    ids=str,
)
def test_groups_divide_the_channels(layer: nn.Module, groups: int) -> None:
    changed = to_group_norm(layer)
    assert isinstance(changed, nn.GroupNorm)
    assert changed.num_groups == groups


def test_frozen_shared_and_evaluated_layers_stay_so() -> None:
    shared = nn.BatchNorm2d(4)
    shared.weight.requires_grad_(requires_grad=False)
    changed = to_group_norm(nn.Sequential(shared, nn.BatchNorm2d(4, affine=False), shared).eval())
    assert isinstance(changed, nn.Sequential)
    first, second, third = changed
    assert first is third
    assert (first.weight.requires_grad, first.bias.requires_grad) == (False, True)
    assert second.weight is None
    assert not any(layer.training for layer in changed.modules())


def test_an_instance_norm_keeps_no_statistics_and_then_trains_per_example() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True), nn.Flatten())
    model.append(nn.Linear(4 * 14 * 14, 10))
    changed = to_group_norm(model)
    assert list(changed.buffers()) == []
    assert torch.equal(changed.eval()(images()), changed.train()(images()))
    _, norms = clipped_gradient_sum(changed, images(), targets=torch.tensor([1, 4, 7]), clip_norm=1.0)
    assert norms.shape == (3,)


def test_a_batch_norm_of_vectors_leaves_them_different() -> None:
    # With one channel a group each number would be normalised by itself, and become the bias.
    vectors = torch.randn(5, 16, generator=torch.Generator().manual_seed(331))
    outputs = to_group_norm(nn.BatchNorm1d(16))(vectors)
    torch.testing.assert_close(outputs, nn.functional.layer_norm(vectors, (16,)))


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
