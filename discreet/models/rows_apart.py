"""Outputs of a model where each row follows from its own example alone."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import torch
from torch import Tensor, nn

from discreet.layers.alone import Alone
from discreet.layers.branches import AnswersDiffer
from discreet.layers.draws import own_draws
from discreet.layers.layer_rules import RULES
from discreet.layers.refusals import Unserved
from discreet.models.models import outputs_of
from discreet.per_example.any_model import OfMany
from discreet.per_example.attributes import own_copy, put_back
from discreet.per_example.objective import filled
from discreet.per_example.passes import FEWEST, as_batches_of_one, side_by_side


def outputs_apart(model: nn.Module, inputs: Tensor) -> Tensor:
    """`outputs_of` a model, (n, k), where row i depends on row i of inputs (n, ...) alone. Nothing
    of a row stays in the model.

    Raises:
      ValueError: the forward changes its parameters or buffers. Any error of the forward.
    """
    return outputs_of(model, inputs, forward=partial(rows_apart, model, keeps=True))


@torch.no_grad()
def rows_apart(layer: nn.Module, inputs: Tensor, *, keeps: bool = False) -> Tensor:
    """The outputs of a layer, (n, ...), where row i depends on row i of inputs (n, ...) alone. The
    rows run side by side, in groups that take the same branches, or else one after the other.

    Args:
      keeps: the layer may keep something of a pass, so that each pass has a copy of it.

    Raises:
      ValueError: the forward changes its parameters or buffers.
    """
    if not len(inputs):
        return layer(inputs)  # type: ignore[no-any-return]
    try:
        return _side_by_side(own_copy(layer) if keeps else layer, inputs)
    except AnswersDiffer as split:
        with suppress(Unserved):
            groups = split.groups(len(inputs))
            parts = [rows_apart(layer, inputs[places], keeps=keeps) for places in groups]
            return torch.cat(parts)[torch.cat(groups).argsort()]
    except Unserved:
        pass
    found = []
    for one in torch.split(inputs, 1):
        own = own_copy(layer) if keeps else layer
        with OfMany():
            found.append(own(one))
    return torch.cat(found)


def _side_by_side(layer: nn.Module, inputs: Tensor) -> Tensor:
    """The outputs of all rows, (n, ...). AnswersDiffer, Unserved: they can't run side by side."""
    count = len(inputs)
    rows = max(count, FEWEST)
    modules = list(layer.modules())
    alone = Alone({}, rows, modules, rules=RULES)
    with put_back(modules), own_draws(count, inputs.device) as draws:
        alone.draws = draws.filled(rows)
        found = side_by_side(alone, layer, as_batches_of_one(filled(inputs, rows)))
    alone.check()
    return found.detach().squeeze(1)[:count]  # type: ignore[no-any-return]
