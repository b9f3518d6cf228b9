"""The part of a model that never changes and comes first: its features are computed once, and the rest learns."""

from __future__ import annotations

import logging
from weakref import WeakKeyDictionary

import torch
from torch import nn

from discreet.data.examples import Examples
from discreet.models.dropout import dropout_layers
from discreet.models.models import frozen_digest, to_train
from discreet.models.scattering import Scattering
from discreet.per_example.terms import unchanged

logger = logging.getLogger("discreet")


def split_fixed(model: nn.Module) -> tuple[nn.Module | None, nn.Module]:
    """The first part of a plain sequence if it never changes (None if it learns, or draws masks), and the rest."""
    if type(model) is nn.Sequential and len(model) > 1 and unchanged(model) and unchanged(model[0]):
        first, values = model[0], list(model[0].parameters())
        learns = any(value.requires_grad for value in values) or bool(dropout_layers(first))
        if isinstance(first, Scattering) or (values and not learns):
            return first, model[1:]
    return None, model


_features: WeakKeyDictionary[Examples, dict[object, Examples]] = WeakKeyDictionary()  # as long as the examples are


@torch.no_grad()
def features_of(fixed: nn.Module, examples: Examples, *, batch_size: int = 256) -> Examples:
    """The examples as the learning part of a model reads them, (n, out_features), on the device of `fixed`."""
    device = next(iter((*fixed.parameters(), *fixed.buffers()))).device
    key = str(device), None if isinstance(fixed, Scattering) else frozen_digest(fixed)
    held = _features.setdefault(examples, {})
    if key not in held:
        to_train(fixed)
        parts, wanted = [], torch.split(examples.inputs, batch_size)
        for number, inputs in enumerate(wanted):
            parts.append(fixed(inputs.to(device)))
            if number % 20 == 19:
                logger.info("features of %d of %d examples", batch_size * (number + 1), len(examples))
        held[key] = Examples(torch.cat(parts), examples.targets.to(device))
    return held[key]
