"""The optimizers of a training loop, which take one step with a noised mean and no second one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_TWICE = (
    "optimizer.step: private.step has run the optimizer already: take this call out of the loop. "
    "Before a step on other data call optimizer.zero_grad()"
)
STEPS = "private_steps"  # of an optimizer without other state, such as plain SGD
_NO_LOSS = "private.step returns no loss, which is private: measure it on other data"


class LoopOptimizers:
    """The optimizers over a model's trainable parameters. A step with the gradients that a private
    step has left raises RuntimeError, wherever it is called."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.all = optimizers
        self._left: list[Tensor] = []  # the gradients of the last step
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._check)

    def step(self, parameters: Sequence[nn.Parameter], mean: Tensor) -> None:
        """Puts the noised mean into `.grad` of the trainable parameters, and steps."""
        self._left = []
        trained = [value for value in parameters if value.requires_grad]
        for value in parameters:
            value.grad = None  # of frozen parameters too
        parts = torch.split(mean, [value.numel() for value in trained])
        for value, part in zip(trained, parts, strict=True):
            value.grad = part.view_as(value).to(value.dtype)

        for optimizer in self.all:
            optimizer.step()
            for group in optimizer.param_groups:  # an optimizer's state_dict has these
                group[STEPS] = group.get(STEPS, 0) + 1
        self._left = [value.grad for value in trained if value.grad is not None]

    def _check(self, optimizer: Optimizer, *_: Any) -> None:
        left = set(map(id, self._left))
        for group in optimizer.param_groups:
            if any(id(value.grad) in left for value in group["params"]):
                raise RuntimeError(_TWICE)


class Stepped:
    """The answer of `DPSGD.step`, which is true if it took a step. It is no number: a scheduler or
    a sum that takes it for a loss gets a TypeError."""

    def __init__(self, is_step: bool) -> None:
        self._is_step = is_step

    def __bool__(self) -> bool:
        return self._is_step

    def __repr__(self) -> str:
        return repr(self._is_step)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, bool | Stepped) and bool(self) is bool(other)

    def __hash__(self) -> int:
        return hash(self._is_step)

    def _refused(self, *_: object) -> NoReturn:
        raise TypeError(_NO_LOSS)

    __float__ = __index__ = __add__ = __radd__ = __mul__ = __rmul__ = _refused
    __lt__ = __gt__ = __truediv__ = __floordiv__ = _refused
