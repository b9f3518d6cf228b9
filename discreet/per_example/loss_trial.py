"""A trial of a loss on made-up outputs: an example's value must not depend on other examples of the
batch.

In a clipped sum the loss gets each example alone, so this does not matter to privacy. But a loss
that its author meant for a batch, such as in-batch softmax, would be a different loss.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from discreet.layers.refusals import CONFUSED
from discreet.per_example.any_model import OfMany
from discreet.per_example.objective import Objective, Tree, count_of, mapped, rows_of, with_floats
from discreet.per_example.trial import (
    ROWS,
    SEED,
    Trial,
    Undrawn,
    agreement,
    differ,
    same_chance,
)

Tensors = list[Tensor]  # parts of a model's outputs, each with the examples first
Losses = Callable[[Tensors, Tree], Tensor]  # of such parts and targets


def check_loss(trial: Trial, outputs: Any) -> None:
    """Raises ValueError if the loss mixes examples. It is tried on outputs for `ROWS` made-up
    examples and on others of the same shapes, and with the model, since it may read what the
    forward left on the modules."""
    with trial.objective.put_back():
        _try_with_model(trial)
        if outputs is not None:
            _try_on(trial.objective, outputs, trial.targets)


_MIXES = (
    "loss: the value of an example depends on other examples of the batch, so that clipping each "
    "gradient bounds nothing: give a function whose value i follows from row i of outputs and "
    "targets alone, without means, ranks or pairs over the batch, and without random numbers"
)


def _try_with_model(trial: Trial) -> None:
    objective = trial.objective
    examples = trial.examples()
    wanted = trial.targets_of(examples)

    def losses(some: slice) -> Tensor:
        given = rows_of(examples, some)
        with OfMany(count_of(given)):
            return objective.losses(objective.outputs(given), rows_of(wanted, some)).detach()

    mixes = False
    with suppress(*CONFUSED), torch.enable_grad(), same_chance(trial.device), Undrawn():
        whole = losses(slice(None))
        alone = [losses(slice(place, place + 1)) for place in range(ROWS)]
        mixes = differ(whole, torch.cat(alone), agreement(objective))
    if mixes:
        raise ValueError(_MIXES)


def _try_on(objective: Objective, outputs: Any, targets: Tree) -> None:
    """Raises ValueError if the loss of one of three rows, or its gradient, changes when another row
    is left out."""
    leaves, spec = tree_flatten(outputs)
    # The dimension of the examples in each tensor that has one.
    dims = {
        at: list(value.shape).index(ROWS)
        for at, value in enumerate(leaves)
        if isinstance(value, Tensor) and ROWS in value.shape
    }
    if not dims:
        return  # no output is known to have a row for each example

    def losses(parts: Tensors, wanted: Tree) -> Tensor:
        found = list(leaves)
        for (at, dim), part in zip(dims.items(), parts, strict=True):
            found[at] = part.movedim(0, dim).contiguous()
        with same_chance(objective.parameters[0].device):
            return objective.losses(tree_unflatten(found, spec), wanted)

    draws = torch.Generator().manual_seed(SEED)
    places = torch.linspace(0, count_of(targets) - 1, 3).long()
    tried = [leaves[at].detach().movedim(dim, 0)[:3] for at, dim in dims.items()]
    between = with_floats(lambda part: torch.rand(part.shape, generator=draws).to(part), tried)
    wide = with_floats(lambda part: 10 * torch.randn(part.shape, generator=draws).to(part), tried)
    rows = rows_of(targets, places)
    made = mapped(partial(_marks, draws), rows)
    mixes = False
    # Some may be out of a loss's range, which is an error on the CPU; on a GPU it would end the
    # process.
    for some, wanted in ((tried, rows), (between, rows), (between, made), (wide, made)):
        with suppress(*CONFUSED):
            mixes = mixes or _mixes(losses, some, wanted)
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


def _mixes(losses: Losses, parts: Tensors, targets: Tree) -> bool:
    whole = _with_gradients(losses, parts, targets)
    for left_out in range(3):
        rows = [row for row in range(3) if row != left_out]
        some = _with_gradients(losses, [part[rows] for part in parts], rows_of(targets, rows))
        if any(differ(one[rows], other) for one, other in zip(whole, some, strict=True)):
            return True
    return False


def _with_gradients(losses: Losses, parts: Tensors, targets: Tree) -> Tensors:
    """The losses, and the gradients of their sum by the outputs: the start of a model's backward
    pass."""
    with torch.enable_grad():
        given = [part.clone().requires_grad_(part.is_floating_point()) for part in parts]
        floats = [part for part in given if part.requires_grad]
        found = losses(given, targets)
        # The zeros are for a loss that does not depend on the outputs.
        total = found.sum() + sum(0 * value.sum() for value in floats)
    return [found.detach(), *torch.autograd.grad(total, floats)]
