"""What the fixed transform of a model makes of a data set, computed once."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import nn

from discreet.privacy.rules.terms import unchanged
from discreet.tasks.examples import Examples
from discreet.tasks.scattering import Scattering


def split_fixed(model: nn.Module) -> tuple[Scattering | None, nn.Module]:
    """The fixed transform that a model begins with (None if there is none), and the part that learns."""
    plain = type(model) is nn.Sequential and len(model) > 1 and unchanged(model) and unchanged(model[0])
    if plain and isinstance(model[0], Scattering):  # type: ignore[index]
        return model[0], model[1:]  # type: ignore[index]
    return None, model


def features_of(fixed: Scattering, examples: Examples, *, batch_size: int = 500) -> Examples:
    """The examples as the learning part of a model reads them, (n, out_features), on the device of `fixed`.

    Kept as long as the examples are: the runs of a sweep share them.
    """
    device = fixed.fine.device
    known = _features.get(examples)
    if known is None or known.inputs.device != device:
        known = _features[examples] = _computed(fixed, examples, batch_size)
    return known


_features: WeakKeyDictionary[Examples, Examples] = WeakKeyDictionary()


@torch.no_grad()
def _computed(fixed: Scattering, examples: Examples, batch_size: int) -> Examples:
    device = fixed.fine.device
    parts = [fixed(inputs.to(device)) for inputs in torch.split(examples.inputs, batch_size)]
    return Examples(torch.cat(parts), examples.targets.to(device))
