"""The optimizers of a client's local steps: SGD, Adam and AdamW with the formulas and defaults of torch.optim.

Row c of each tensor (k, ...) is client c; each counts its own steps, and has the numbers that it would have alone. With
DP-SGD the gradient is the noised mean: what is done with it is post-processing. torch.optim itself is not used:
importing it costs each client process 1.5 s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8  # as torch.optim has them


@dataclass(frozen=True)
class LocalOptimizer:
    """How a gradient moves the parameters: by sgd, adam (Kingma and Ba 2015) or adamw (Loshchilov and Hutter 2019).

    sgd and adam add `weight_decay` times the parameters to the gradient, adamw shrinks the parameters by the learning
    rate times it. By the schedule, constant, cosine or linear, the rate falls towards 0 over a round's local steps.
    """

    name: str
    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: str = "constant"

    def rates(self, taken: Tensor, planned: Tensor) -> Tensor | None:
        """The learning rates (k,) after `taken` of `planned` steps; None if all are `learning_rate`."""
        if self.schedule == "constant":
            return None
        done = taken / planned
        return self.learning_rate * (1 - done if self.schedule == "linear" else (1 + torch.cos(math.pi * done)) / 2)


@dataclass(frozen=True, eq=False)
class OptimizerState:
    """Steps of each client in this round, (k,), and velocity, or means of gradients and squares; moved in place."""

    taken: Tensor
    planned: Tensor
    moments: tuple[list[Tensor], ...]


def init(optimizer: LocalOptimizer, params: list[Tensor], planned: Sequence[int]) -> OptimizerState:
    """The state before the first step, for parameters (k, ...) of clients that will take `planned` steps, (k,)."""
    count = int(optimizer.momentum > 0) if optimizer.name == "sgd" else 2
    moments = tuple([torch.zeros_like(values) for values in params] for _ in range(count))
    steps = torch.tensor(planned, dtype=torch.float64)
    return OptimizerState(torch.zeros_like(steps), steps, moments)


def apply(optimizer: LocalOptimizer, state: OptimizerState, params: list[Tensor], gradients: list[Tensor]) -> None:
    """Takes one step, in place, for the first clients, which `params` and `gradients` (active, ...) have rows of."""
    taken = state.taken[: len(params[0])]
    rates = optimizer.rates(taken, state.planned[: len(taken)])
    taken.add_(1)
    for number, (values, gradient) in enumerate(zip(params, gradients, strict=True)):
        moments = [moment[number][: len(taken)] for moment in state.moments]
        if optimizer.weight_decay and optimizer.name != "adamw":
            gradient = gradient.add(values, alpha=optimizer.weight_decay)
        if optimizer.name == "sgd":
            move = moments[0].mul_(optimizer.momentum).add_(gradient) if moments else gradient
            if rates is None:
                values.sub_(move, alpha=optimizer.learning_rate)
            else:
                values.sub_(move * _rows(rates, values))
        else:
            steps = torch.full_like(taken, optimizer.learning_rate) if rates is None else rates
            if optimizer.weight_decay and optimizer.name == "adamw":
                values.mul_(_rows(1 - optimizer.weight_decay * steps, values))
            _adam_step(values, gradient, moments=moments, taken=taken, rates=steps)


def _adam_step(values: Tensor, gradient: Tensor, *, moments: list[Tensor], taken: Tensor, rates: Tensor) -> None:
    mean, square = moments
    mean.lerp_(gradient, 1 - BETA_1)
    square.mul_(BETA_2).addcmul_(gradient, gradient, value=1 - BETA_2)
    size = (square / _rows(1 - BETA_2**taken, values)).sqrt_().add_(EPSILON)
    values.sub_(_rows(rates / (1 - BETA_1**taken), values) * mean / size)


def _rows(factors: Tensor, values: Tensor) -> Tensor:
    return factors.to(values).view(-1, *[1] * (values.dim() - 1))
