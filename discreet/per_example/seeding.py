"""A check that a forward leaves PyTorch's generators alone: one that seeds them has the same random
numbers in each step, which are no secret, and would leave the generators known to all that draw
later."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from discreet.layers.draws import generator_states, generators_kept, seed_draws
from discreet.layers.functions import RANDOM, called_inside, function_of
from discreet.layers.refusals import CONFUSED, place
from discreet.per_example.attributes import put_back
from discreet.per_example.objective import Objective, Tree
from discreet.per_example.trial import KINDS, ROWS, made_up

_SEEDS = (52183, 90481)


class _States(TorchFunctionMode):
    """Records the states of the generators before each call that may draw, and where it is."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.seen = list[tuple[str, list[Tensor]]]()
        self.inner: Any = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        function = function_of(func)
        named = kwargs or {}
        if function.is_python and func is not self.inner:
            return called_inside(self, func, types, args, named)
        if function.name in RANDOM and named.get("generator") is None:
            self.note(place())
        return func(*args, **named)

    def note(self, where: str) -> None:
        self.seen.append((where, generator_states(self.device)))


def check_seeds(objective: Objective, inputs: Tree) -> None:
    """Raises ValueError if a generator has the same state in two passes that begin with different
    ones, where the forward draws or at its end. Only the shapes and types of `inputs` are used."""
    for kind in KINDS:
        with suppress(*CONFUSED):
            one, other = (_seen(objective, inputs, seed, kind) for seed in _SEEDS)
            break
    else:
        return  # the model can't be called with several examples
    for (where, states), (_, others) in zip(one, other, strict=False):
        if any(map(torch.equal, states, others)):
            raise ValueError(
                f"the model's forward sets the state of PyTorch's random generator{where} "
                "(torch.manual_seed, fork_rng, set_rng_state): its numbers would be known, and so "
                "those of all that draw later. Make fixed numbers once, as a buffer, or by a "
                "torch.Generator of their own"
            )


def _seen(
    objective: Objective, inputs: Tree, seed: int, kind: int
) -> list[tuple[str, list[Tensor]]]:
    device = objective.parameters[0].device
    examples = made_up(objective.model, inputs, ROWS, kind=kind)
    with generators_kept(device), put_back(objective.kept), _States(device) as states:
        seed_draws(seed, device)
        with torch.enable_grad():
            objective.outputs(examples)
        states.note("")
        found: list[tuple[str, list[Tensor]]] = states.seen
    return found
