"""A client's part of a step over all examples of all clients, for secure aggregation at example
level."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from discreet.models.models import load_parameters, masks_from, to_train
from discreet.per_example.apart import Snapshot
from discreet.per_example.in_turn import gradients_in_turn
from discreet.per_example.objective import Loss
from discreet.per_example.own_code import memory_for
from discreet.per_example.per_example import clipped_sum_by_owner
from discreet.privacy.randomness import RandomSource
from discreet.training.failing_units import NOISE_ALONE, Unit, gradient_or_none
from discreet.training.local_training import LocalSettings
from discreet.training.units import Held, units_of

UNIT_STEPS = 2.0**24  # a clip norm in the steps of a unit's gradient


@dataclass(frozen=True)
class SharedClip:
    """The clip norm C of a unit's gradient, and the source of dropout masks and of the rows of an
    owner who has too many. `rows_per_owner`: if set the unit is an owner, of whom a step reads at
    most so many rows; None: it is an example."""

    clip_norm: float
    source: RandomSource
    rows_per_owner: int | None = None


@torch.no_grad()
def shared_step(
    model: nn.Module,
    params: Tensor,
    examples: Held,
    *,
    settings: LocalSettings,
    clip: SharedClip,
) -> Tensor:
    """A client's part of a step over all examples of all clients, (num_params,), float64, for
    secure aggregation at example level: minus the learning rate times the sum of its clipped
    gradients over `batch_size`, a public constant. It is computed in float64 throughout, unit by
    unit, without noise. The gradient of an owner is that of the mean loss over its rows.

    Sensitivity: adding, removing or zeroing out one unit moves it by at most learning_rate * C /
    batch_size in L2, plus the rounding of a product
    (`discreet.privacy.secure_grid.SecureSum.gradient_slack`), however many units there are: each
    gradient is rounded to whole multiples of C / 2^24, of which a float64 sum of up to 2^29 is
    exact, and one that can't be computed changes no other. There is no sampling: every unit is in
    every step. Gradients are taken at `params` (num_params,); the model is not changed.
    """
    exact = copy.deepcopy(model).double()
    load_parameters(exact, params)
    to_train(exact)
    before = Snapshot(exact, memory_for(exact.modules(), settings.loss))
    # Rounding moves a gradient by at most sqrt(num_params) / 2 steps: it is then no longer than C.
    most = UNIT_STEPS - math.sqrt(params.numel()) / 2
    total = torch.zeros(params.shape, dtype=torch.float64)
    if settings.failing != NOISE_ALONE:
        with masks_from(clip.source, exact):
            for gradient in _gradients(exact, examples, settings.loss, clip):
                found = gradient_or_none(gradient, failing=settings.failing)
                before.restore()
                if found is not None:
                    total += found.mul_(most / clip.clip_norm).round_()
                del found  # the next one takes its memory
    return total.mul_(clip.clip_norm / UNIT_STEPS * -settings.learning_rate / settings.batch_size)


def _gradients(
    model: nn.Module, examples: Held, loss: Loss, clip: SharedClip
) -> Iterator[Callable[[], Tensor]]:
    """Functions that compute the clipped gradient of each unit, (num_params,), alone."""
    if clip.rows_per_owner is None:
        table = examples.subset(torch.arange(len(examples)))
        inputs = _in_float64(table.inputs)
        yield from gradients_in_turn(
            model, inputs, targets=table.targets, clip_norm=clip.clip_norm, loss=loss
        )
        return
    held = units_of(examples, clip.rows_per_owner)
    everybody = held.drawn(torch.arange(len(held)), clip.source.child("rows"))
    for inputs, targets in held.each(everybody):
        yield partial(_of_owner, model, (_in_float64(inputs), targets), loss, clip.clip_norm)


def _of_owner(model: nn.Module, rows: Unit, loss: Loss, clip_norm: float) -> Tensor:
    alone = torch.zeros(len(rows[1]), dtype=torch.int64)
    return clipped_sum_by_owner(model, rows, alone, clip_norm=clip_norm, loss=loss)[0]


def _in_float64(inputs: Tensor) -> Tensor:
    if inputs.is_floating_point():
        return inputs.double()
    return inputs
