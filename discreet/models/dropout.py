"""Dropout: the one kind of layer that may draw random numbers as a model trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from discreet.privacy.randomness import RandomSource

_DROPOUTS = {
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    nn.MultiheadAttention,  # which drops by itself
}


def dropout_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of torch.nn that draw masks as `model` trains. A class derived from one may draw in another way, and
    is none of them.

    >>> dropout_layers(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.2), nn.Dropout(0.0)))
    [Dropout(p=0.2, inplace=False)]
    """
    return [layer for layer in model.modules() if type(layer) in _DROPOUTS and _chance(layer) > 0]


def _chance(layer: nn.Module) -> float:
    return float(layer.dropout if isinstance(layer, nn.MultiheadAttention) else layer.p)  # type: ignore[arg-type]


@contextmanager
def masks_from(source: RandomSource, model: nn.Module) -> Iterator[None]:
    """`torch_draws_from` for a model with dropout. For another one, PyTorch's generator is not touched."""
    if not dropout_layers(model):
        yield
        return
    with torch_draws_from(source, model):
        yield


@contextmanager
def torch_draws_from(source: RandomSource, model: nn.Module) -> Iterator[None]:
    """Within it, PyTorch's generators draw as `source` says: the same masks again for a seeded source, others each time
    for a secure one. Afterwards those of the CPU and of the model's devices are as they were.

    Masks are not noise that protects, and need not be secret for that. They are drawn independently of all data, each
    example's apart from the others', and what one example adds to a clipped sum is at most the clip norm for each fixed
    choice of everybody's masks. But their seed must be secret, and of a secure source it never leaves this function:
    who knew it could compute which masks go to which place in a batch, and places shift if an example is missing.
    """
    seed = int(source.child("dropout").words(1)[0])
    devices = sorted({value.device.index for value in model.parameters() if value.is_cuda})
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        yield
