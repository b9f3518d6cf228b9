"""Outputs of a model where each row follows from its own example alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

import torch
from torch import Tensor, nn

from discreet.layers.alone import Alone
from discreet.layers.branches import AnswersDiffer
from discreet.layers.draws import Draws, drawn_from, own_draws
from discreet.layers.layer_rules import RULES
from discreet.layers.refusals import Unserved
from discreet.models.models import BATCH, outputs_of
from discreet.per_example.any_model import OfMany
from discreet.per_example.apart import apart, undone
from discreet.per_example.attributes import put_back
from discreet.per_example.objective import filled
from discreet.per_example.passes import FEWEST, as_batches_of_one, side_by_side
from discreet.privacy.randomness import RandomSource

# A context with a layer for one pass.
ForAPass = Callable[[nn.Module], AbstractContextManager[nn.Module]]


def outputs_apart(
    model: nn.Module, inputs: Tensor, first: int = 0, *, source: RandomSource
) -> Tensor:
    """`outputs_of` a model, (n, k), where row i depends on row i of inputs (n, ...) alone. Nothing
    of a row stays in the model. What a forward draws follows from `source` and the number of the
    row, from `first` on.

    Raises:
      ValueError: the forward changes its parameters or buffers. Any error of the forward.
    """
    key = source.child("rating").words(4).tobytes()
    numbers = iter(torch.split(torch.arange(first, first + len(inputs)), BATCH))

    def forward(part: Tensor) -> Tensor:
        with drawn_from(key, next(numbers)):
            return rows_apart(model, part, keeps=True)

    return outputs_of(model, inputs, forward=forward)


@torch.no_grad()
def rows_apart(layer: nn.Module, inputs: Tensor, *, keeps: bool = False) -> Tensor:
    """The outputs of a layer, (n, ...), where row i depends on row i of inputs (n, ...) alone. The
    rows run side by side, in groups that take the same branches, or else one after the other.

    Args:
      keeps: the layer may leave something of a pass somewhere, which is undone after it.

    Raises:
      ValueError: the forward changes its parameters or buffers.
    """
    if not len(inputs):
        return layer(inputs)  # type: ignore[no-any-return]
    with own_draws(len(inputs), inputs.device) as draws:
        return _apart(layer, inputs, draws, apart if keeps else undone)


def _apart(layer: nn.Module, inputs: Tensor, draws: Draws, for_a_pass: ForAPass) -> Tensor:
    """See `rows_apart`."""
    try:
        with for_a_pass(layer) as own:
            return _side_by_side(own, inputs, draws)
    except AnswersDiffer as split:
        with suppress(Unserved):
            groups = split.groups(len(inputs))
            of_group = ((inputs[places], draws.of(places)) for places in groups)
            parts = [_apart(layer, some, drawn, for_a_pass) for some, drawn in of_group]
            return torch.cat(parts)[torch.cat(groups).argsort()]
    except Unserved:
        pass
    found = []
    for place in draws.seeded():
        drawn = draws.of(torch.tensor([place]))
        with for_a_pass(layer) as own, OfMany(1, drawn):
            found.append(own(inputs[place : place + 1]))
    return torch.cat(found)


def _side_by_side(layer: nn.Module, inputs: Tensor, draws: Draws) -> Tensor:
    """The outputs of all rows, (n, ...). AnswersDiffer, Unserved: they can't run side by side."""
    count = len(inputs)
    rows = max(count, FEWEST)
    modules = list(layer.modules())
    watch = Alone({}, rows, modules, rules=RULES)
    with put_back(modules):
        watch.draws = draws.filled(rows)
        found = side_by_side(watch, layer, as_batches_of_one(filled(inputs, rows)))
    watch.check()
    return found.detach().squeeze(1)[:count]  # type: ignore[no-any-return]
