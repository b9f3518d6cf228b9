"""Clipped sums that no unit can stop.

A server may choose parameters with which the gradient of one example can't be computed: it is not
finite, or a forward raises an error. If the client then answered with an error, its kind of reply
would say, without noise, something about that example. At a node such a unit counts as zero, each
other one as before, and the node's own log says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from discreet.layers.draws import own_draws
from discreet.per_example.apart import Snapshot
from discreet.per_example.objective import Loss, trainable
from discreet.privacy.clipping import clip_by_norm

if TYPE_CHECKING:
    from discreet.per_example.memory import Memory

logger = logging.getLogger("discreet.client")

# What a gradient that can't be computed does: it ends the work with its error, as people who train
# on their own data want it; or its unit counts as zero, as at a node. With NOISE_ALONE no gradient
# is computed.
RAISES = "raises"
COUNTS_AS_ZERO = "counts as zero"
NOISE_ALONE = "noise alone"
NO_GRADIENT = "a unit's gradient can't be computed and counts as zero"


class TimeIsUp(BaseException):
    """The work of a message has taken too long. It derives from BaseException, so that no `except
    Exception` in a model or app can catch it."""


_told: set[tuple[str, type[Exception]]] = set()

Unit = tuple[Tensor, Tensor]  # the rows of one unit: inputs and targets


@dataclass(frozen=True, eq=False)
class GradientOfUnit:
    """The clipped gradient of one unit, computed by plain autograd.

    Attributes:
      loss: the mean over the unit's rows is differentiated.
      clip_norm, order: the largest L2 (2) or L1 (1) norm of the gradient.
      memory: `memory_for` the model and the loss.
    """

    model: nn.Module
    loss: Loss
    clip_norm: float
    order: int = 2
    memory: Memory | None = None

    def zero(self) -> Tensor:
        """The gradient of a unit that gives none, (num_params,)."""
        return torch.cat([torch.zeros_like(each).reshape(-1) for each in trainable(self.model)])

    def of(self, unit: Unit) -> Tensor | None:
        """The clipped gradient, (num_params,); None if it can't be computed. `clipped_total` undoes
        what the unit leaves in the model."""
        try:
            gradient = self._gradient(*unit)
        except Exception as error:  # noqa: BLE001 - of a model or loss that a site may have written
            say_once(NO_GRADIENT, error)
            return None
        clipped, _ = clip_by_norm(gradient.unsqueeze(0), self.clip_norm, order=self.order)
        return clipped[0]

    def _gradient(self, inputs: Tensor, targets: Tensor) -> Tensor:
        parameters = trainable(self.model)  # before the forward, which may freeze some
        with torch.enable_grad(), own_draws(1, inputs.device) as draws:
            next(draws.seeded())
            loss = self.loss(self.model(inputs), targets).mean()
            gradients = torch.autograd.grad(
                loss, parameters, allow_unused=True, materialize_grads=True
            )
        return torch.cat([each.reshape(-1) for each in gradients])


def clipped_total(
    together: Callable[[], Tensor], each: GradientOfUnit, units: Iterable[Unit], *, failing: str
) -> Tensor:
    """The sum of the clipped gradients of some units, (num_params,).

    Sensitivity: with COUNTS_AS_ZERO one unit moves the sum by at most the clip norm, also if it
    decides whether the units can be computed together: each other unit has its clipped gradient
    either way, up to the rounding of floats.

    Args:
      together: computes all at once, and may fail.
      each: computes one unit, if `together` fails.
      failing: RAISES, COUNTS_AS_ZERO or NOISE_ALONE.
    """
    if failing == NOISE_ALONE:
        return each.zero()
    if failing == RAISES and each.memory is None:
        return together()
    before = Snapshot(each.model, each.memory)
    try:
        total = together()
    except Exception as error:
        if failing == RAISES:
            raise
        say_once("the units of a step can't be computed together", error)
        before.restore()
        total = each.zero()
        for unit in units:
            if (found := each.of(unit)) is not None:
                total += found
            before.restore()
    finally:
        if each.memory is not None:
            before.restore()
    return total


def gradient_or_none(gradient: Callable[[], Tensor], *, failing: str) -> Tensor | None:
    """The clipped gradient of one unit, or with COUNTS_AS_ZERO None if it can't be computed. The
    caller undoes what the unit leaves."""
    try:
        return gradient()
    except Exception as error:
        if failing == RAISES:
            raise
        say_once(NO_GRADIENT, error)
        return None


def rows_of(inputs: Tensor, targets: Tensor) -> Iterator[Unit]:
    """A copy of each row as a unit."""
    for place in range(len(targets)):
        row = [place]
        yield inputs[row], targets[row]


def say_once(what: str, error: Exception) -> None:
    """Logs an error with its traceback, each kind once in a process: a server must not fill a
    node's log."""
    kind = what, type(error)
    if kind not in _told:
        _told.add(kind)
        logger.error("%s: %s", what, error, exc_info=error)
