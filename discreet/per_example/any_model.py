"""Per-example gradients by a loop over examples: for models that vmap can't follow, and as the
reference for its results.

The clipped vector is the vector that is summed. So no example can add more than the clip norm.
"""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from discreet.layers.draws import Draws
from discreet.layers.functions import (
    ATTENTION,
    DROPPING,
    OF_ATTENTION,
    RANDOM,
    RECURRENT,
    by_name,
    called_inside,
    function_of,
    with_rate,
)
from discreet.layers.lanes import level, squeezed
from discreet.layers.terms import Rows, Term
from discreet.per_example.objective import (
    LOSS_SCALE,
    Objective,
    Tree,
    count_of,
    detached,
    rows_of,
)

_log = logging.getLogger("discreet")
_told: WeakSet[nn.Module] = WeakSet()  # models that the log has named


class OfMany(TorchFunctionMode):
    """A context in which a batch of one, `count`, keeps its first dimension in `squeeze()`, as a
    batch of several does. With `draws`, of one example, random numbers are its own."""

    def __init__(self, count: int = 1, draws: Draws | None = None) -> None:
        super().__init__()
        self.is_one = count == 1
        self.draws = draws
        self.inner: Any = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        function = function_of(func)
        keeps = self.is_one and function.name == "squeeze" and level() < 0
        if keeps and not function.writes and len(args) == 1 and not named:
            return squeezed(args[0])
        if function.is_python and not function.is_plain and func is not self.inner:
            return called_inside(self, func, types, args, named)
        if self.draws is not None and level() < 0 and function.name in RANDOM:
            return _own_draw(self.draws, func, args, named)
        return func(*args, **named)


def _own_draw(draws: Draws, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """The result of a function that may draw, for one example with draws of its own: what it gets
    side by side with others."""
    function = function_of(func)
    from discreet.layers.dropping import attended, dropped, rounded  # a draw may need it

    if function.name in RECURRENT:
        return func(*with_rate(args, rounded), **named)
    if function.name == ATTENTION:
        given = by_name(OF_ATTENTION, args, named)
        if given.get("dropout_p"):
            parts = [given.pop(name) for name in OF_ATTENTION[:3]]
            return attended(parts, given.pop("attn_mask", None), draws, given)
    elif function.name in DROPPING:
        given = by_name(("input", "p", "train"), args, named)
        if given["train"] and 0 < given["p"] <= 1:
            values = given["input"]
            found = dropped(function.name, values.unsqueeze(0), given["p"], draws)[0]
            return values.copy_(found) if function.writes else found
    elif named.get("generator") is None and named.get("out") is None:
        found = draws.sampled(function.name, lambda _: func(*args, **named))[0]
        return args[0] if function.writes else found
    return func(*args, **named)


def built_terms(
    objective: Objective, trees: tuple[Tree, ...], draws: Draws, *, reason: str
) -> list[Term]:
    """Builds every gradient, n * num_params floats, by a loop over examples. The draws of one
    example do not affect the next. `trees`: inputs and targets.

    `reason`: why the examples can't run side by side.
    """
    found = []
    for place in draws.seeded():
        one = [place]  # a copy: a forward may write to it, and rows may share memory
        own = draws.of(torch.tensor([place]))
        try:
            with objective.put_back():
                example = [rows_of(tree, one) for tree in trees]
                found.append(plain_gradient(objective, example[0], example[1], own))
        except RuntimeError as error:
            raise ValueError(
                f"the model can't be called with one example alone: {error}"
            ) from error
    _tell(objective.model, reason)
    return [
        Rows(slot, torch.stack(rows).detach().to(objective.dtype))
        for slot, rows in zip(objective.slots.values(), zip(*found, strict=True), strict=True)
    ]


def _tell(model: nn.Module, reason: str) -> None:
    if model not in _told:
        _told.add(model)
        name = type(model).__name__
        _log.warning(
            "gradients of %s are computed by a slower loop over examples: %s", name, reason
        )


def plain_gradient(
    objective: Objective, inputs: Tree, targets: Tree, draws: Draws | None = None
) -> list[Tensor]:
    """LOSS_SCALE times the gradient of the loss for a batch of one example, or unit, by plain
    autograd; zero for unused parameters."""
    return gradient_of(objective, plain_loss(objective, inputs, targets, draws))


def plain_loss(
    objective: Objective, inputs: Tree, targets: Tree, draws: Draws | None = None
) -> Tensor:
    """The loss (1,) of a batch of one example, or unit."""
    inputs = detached(inputs)
    unit = (rows_of(inputs, 0), rows_of(targets, 0)) if objective.of_units else None
    with torch.enable_grad(), OfMany(1 if unit is None else count_of(unit[0]), draws):
        if unit is not None:
            return objective.unit_loss(*unit)
        return objective.losses(objective.outputs(inputs), targets)


def gradient_of(objective: Objective, loss: Tensor) -> list[Tensor]:
    """LOSS_SCALE times the gradient of a loss. It is scaled afterwards: a hook or a backward that
    clamps gradients would do something else to scaled ones."""
    parameters = objective.trainable()
    if not loss.requires_grad:
        return [torch.zeros_like(value) for value in parameters]
    found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return [value.to_dense() * LOSS_SCALE for value in found]
