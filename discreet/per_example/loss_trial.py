"""A trial of a loss on made-up outputs: an example's value must not depend on other examples of the
batch.

In a clipped sum the loss gets each example alone, so this does not matter to privacy. But a loss
that its author meant for a batch, such as in-batch softmax, would be a different loss.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from discreet.layers.refusals import CONFUSED
from discreet.per_example.any_model import OfMany
from discreet.per_example.attributes import put_back
from discreet.per_example.objective import Objective, Tree, count_of, mapped, rows_of
from discreet.per_example.trial import (
    AGREEMENT,
    COARSE_AGREEMENT,
    ROWS,
    Undrawn,
    differ,
    made_up,
    same_chance,
)

_SEED = 52183


def check_loss(objective: Objective, outputs: Any, inputs: Tree, targets: Tree) -> None:
    """Raises ValueError if the loss mixes examples. It is tried on outputs for `ROWS` made-up
    examples and on others of the same shapes, and with the model, since it may read what the
    forward left on the modules."""
    with put_back(objective.kept):
        _try_with_model(objective, inputs, targets)
        if outputs is not None:
            try_loss(objective, outputs, targets)


_MIXES = (
    "loss: the value of an example depends on other examples of the batch, so that clipping each "
    "gradient bounds nothing: give a function whose value i follows from row i of outputs and "
    "targets alone, without means, ranks or pairs over the batch, and without random numbers"
)


def _try_with_model(objective: Objective, inputs: Tree, targets: Tree) -> None:
    examples = made_up(objective.model, inputs, ROWS)
    places = torch.linspace(0, count_of(targets) - 1, ROWS).long()
    if targets is inputs:
        wanted = examples
    else:
        wanted = rows_of(targets, places)

    def losses(some: slice) -> Tensor:
        given = rows_of(examples, some)
        with OfMany(count_of(given)):
            return objective.losses(objective.outputs(given), rows_of(wanted, some)).detach()

    mixes = False
    with (
        suppress(*CONFUSED),
        torch.enable_grad(),
        same_chance(objective.parameters[0].device),
        Undrawn(),
    ):
        whole = losses(slice(None))
        alone = [losses(slice(place, place + 1)) for place in range(ROWS)]
        mixes = differ(whole, torch.cat(alone), COARSE_AGREEMENT if objective.rounds else AGREEMENT)
    if mixes:
        raise ValueError(_MIXES)


def try_loss(objective: Objective, outputs: Any, targets: Tree) -> None:
    """Raises ValueError if the loss of one of three rows, or its gradient, changes when another row
    is left out."""
    tried = _Outputs.of(outputs)
    if tried is None:
        return  # no output is known to have a row for each example
    draws = torch.Generator().manual_seed(_SEED)
    count = count_of(targets)
    places = torch.linspace(0, count - 1, 3).long()
    between = tried.made(lambda shape: torch.rand(shape, generator=draws))
    wide = tried.made(lambda shape: 10 * torch.randn(shape, generator=draws))
    rows = rows_of(targets, places)
    made = mapped(partial(_marks, draws), rows)
    mixes = False
    # Some may be out of a loss's range, which is an error on the CPU; on a GPU it would end the
    # process.
    for some, wanted in ((tried, rows), (between, rows), (between, made), (wide, made)):
        with suppress(*CONFUSED):
            mixes = mixes or _mixes(objective, some, wanted)
    if mixes:
        raise ValueError(_MIXES)


def _marks(draws: torch.Generator, targets: Any) -> Any:
    """Other targets of the same type and shape; graphs as they are."""
    if not isinstance(targets, Tensor):
        return targets
    marks = torch.rand((3, *targets.shape[1:]), generator=draws)
    if not targets.is_floating_point():
        marks = marks.sub_(marks.mean(0)) > 0
    return marks.to(targets)


@dataclass(frozen=True)
class _Outputs:
    """A model's outputs for `ROWS` examples. `dims`: the dimension of the examples in each tensor
    of floats, None for a tensor without one."""

    leaves: list[Any]
    spec: Any
    dims: list[int | None]

    @staticmethod
    def of(outputs: Any) -> _Outputs | None:
        leaves, spec = tree_flatten(outputs)
        dims = [_dim_of_rows(value) for value in leaves]
        if any(dim is not None for dim in dims):
            return _Outputs(leaves, spec, dims).taken(list(range(3)))
        return None

    def taken(self, rows: list[int]) -> _Outputs:
        """A copy of some of the examples."""
        index = torch.tensor(rows)
        pairs = zip(self.leaves, self.dims, strict=True)
        leaves = [
            value if dim is None else value.detach().index_select(dim, index.to(value.device))
            for value, dim in pairs
        ]
        return replace(self, leaves=leaves)

    def made(self, draw: Any) -> _Outputs:
        """Outputs for three examples with other numbers."""
        pairs = zip(self.leaves, self.dims, strict=True)
        leaves = [
            draw(value.shape).to(value) if dim is not None and value.is_floating_point() else value
            for value, dim in pairs
        ]
        return replace(self, leaves=leaves)

    def floats(self) -> list[tuple[Tensor, int]]:
        """The numbers that have a gradient, each with the dimension of its rows."""
        pairs = zip(self.leaves, self.dims, strict=True)
        return [
            (value.requires_grad_(), dim)
            for value, dim in pairs
            if dim is not None and value.is_floating_point()
        ]


def _dim_of_rows(value: Any) -> int | None:
    if isinstance(value, Tensor) and ROWS in value.shape:
        return list(value.shape).index(ROWS)
    return None


def _mixes(objective: Objective, outputs: _Outputs, targets: Tree) -> bool:
    whole = _losses_and_gradients(objective, outputs, targets)
    for left_out in range(3):
        rows = [row for row in range(3) if row != left_out]
        part = _losses_and_gradients(objective, outputs.taken(rows), rows_of(targets, rows))
        if any(differ(one[rows], other) for one, other in zip(whole, part, strict=True)):
            return True
    return False


def _losses_and_gradients(objective: Objective, outputs: _Outputs, targets: Tree) -> list[Tensor]:
    """The losses, and the gradients of their sum by the outputs, examples first: the start of a
    model's backward pass."""
    device = objective.parameters[0].device
    with torch.enable_grad(), same_chance(device):
        given = outputs.taken(list(range(count_of(targets))))
        floats, dims = zip(*given.floats(), strict=True)
        losses = objective.losses(tree_unflatten(given.leaves, given.spec), targets)
        # The zeros are for a loss that does not depend on the outputs.
        total = losses.sum() + sum(0 * value.sum() for value in floats)
    gradients = torch.autograd.grad(total, floats)
    pairs = zip(gradients, dims, strict=True)
    return [losses.detach(), *(gradient.movedim(dim, 0) for gradient, dim in pairs)]
