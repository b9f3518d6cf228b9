"""Replaces BatchNorm by GroupNorm, so that a pretrained or custom network can be trained with
privacy.

BatchNorm normalises an example by the others of its batch, so that the gradient of one example
depends on all of them: clipping does not bound an example's influence, and the running statistics
are released beside the parameters. GroupNorm (Wu and He 2018, arXiv 1803.08494) normalises each
example by itself.
"""

from __future__ import annotations

import copy
import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase
from torch.nn.modules.instancenorm import _InstanceNorm


def to_group_norm(model: nn.Module, groups: int = 32) -> nn.Module:
    """A copy of a model in which no layer mixes the examples of a batch. The original is not
    changed.

    Each BatchNorm2d, 3d and SyncBatchNorm becomes a GroupNorm with the same number of channels,
    epsilon, weight and bias, and the layers that a class of one's own applies after it (timm's
    activation). If `groups` does not divide the channels, the number of groups is the
    largest divisor of both. A BatchNorm1d becomes a GroupNorm with a single group of all its
    channels, as in LayerNorm: it may normalise plain vectors, and a group of one number would
    always be normalised to 0. An InstanceNorm no longer keeps running statistics.

    Layers and weights that the model shares stay shared, a frozen weight stays frozen, and device,
    dtype and mode (train or eval) are kept. Running statistics are dropped, so a pretrained model
    must be trained further before use.

    >>> model = nn.Sequential(nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24))
    >>> to_group_norm(model, groups=16)[1].num_groups
    8
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if groups < 1:
        raise ValueError(f"groups must be at least 1 (got {groups})")
    for name, layer in model.named_modules():
        if isinstance(layer, _LazyNormBase):
            kind = type(layer).__name__
            raise ValueError(
                f"{name} ({kind}) has no channels yet: call the model once, then convert it"
            )
    changed = copy.deepcopy(model)
    made = {
        id(layer): _by_example(layer, name or "the model", groups)
        for name, layer in changed.named_modules()
    }
    for parent in list(changed.modules()):
        for name, child in parent._modules.items():
            if child is not None:
                setattr(parent, name, made[id(child)])
    return made[id(changed)]


def _by_example(layer: nn.Module, name: str, groups: int) -> nn.Module:
    # Running statistics would be used in evaluation, and released.
    if isinstance(layer, _InstanceNorm):
        layer.running_mean = layer.running_var = layer.num_batches_tracked = None
        layer.track_running_stats = False
    if not isinstance(layer, _BatchNorm):
        return layer
    channels = layer.num_features
    if isinstance(layer, nn.BatchNorm1d):
        if channels == 1:
            raise ValueError(
                f"{name} is a BatchNorm1d of one channel: no norm of a single number is left, "
                "take it out"
            )
        groups = 1
    norm = _norm_of(layer, name)(
        math.gcd(groups, channels), channels, eps=layer.eps, affine=layer.affine
    )
    norm.weight = layer.weight
    norm.bias = layer.bias
    for child, module in layer.named_children():
        norm.add_module(child, module)
    return norm.train(layer.training)


class GroupNormThen(nn.GroupNorm):
    """A GroupNorm, and then its own layers in their order, such as an activation."""

    def forward(self, input: Tensor) -> Tensor:
        """(n, channels, ...) to the same shape, unless a layer changes it."""
        found = super().forward(input)
        for layer in self.children():
            found = layer(found)
        return found


def _norm_of(layer: _BatchNorm, name: str) -> type[nn.GroupNorm]:
    """The class for a BatchNorm: another than GroupNorm if it applies layers of its own, as that of
    timm does with an activation. ValueError: it does something else."""
    kind = type(layer)
    if kind.forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
        return nn.GroupNorm
    if not _applies_its_layers(copy.deepcopy(layer).eval()):
        raise ValueError(
            f"{name} ({kind.__name__}) does more than BatchNorm and then its own layers: replace "
            "it by hand"
        )
    return GroupNormThen


@torch.no_grad()
def _applies_its_layers(layer: _BatchNorm) -> bool:
    """True if its forward is that of BatchNorm, and then of its layers in their order."""
    dimensions = {nn.BatchNorm1d: 0, nn.BatchNorm3d: 3}
    space = [2] * next((dimensions[kind] for kind in dimensions if isinstance(layer, kind)), 2)
    draws = torch.Generator().manual_seed(0)
    like = next(itertools.chain(layer.parameters(), layer.buffers(), [torch.zeros(())]))
    inputs = torch.randn(5, layer.num_features, *space, generator=draws).to(like)
    expected = _BatchNorm.forward(layer, inputs)
    for child in layer.children():
        expected = child(expected)
    try:
        found = layer(inputs)
    except (TypeError, RuntimeError):
        return False
    return isinstance(found, Tensor) and torch.allclose(found, expected)
