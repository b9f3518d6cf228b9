"""A client's part of a step over all examples of all clients, for secure aggregation at example
level."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from discreet.models.models import load_parameters, masks_from, to_train
from discreet.per_example.per_example import clipped_sum_by_owner, sequential_sum
from discreet.privacy.randomness import RandomSource
from discreet.privacy.secure_grid import MOST_GRADIENTS
from discreet.training.failing_units import (
    NOISE_ALONE,
    GradientOfUnit,
    Unit,
    clipped_total,
    rows_of,
)
from discreet.training.local_training import LocalSettings
from discreet.training.units import Held, units_of


@dataclass(frozen=True)
class SharedClip:
    """The clip norm C of a unit's gradient, and the source of dropout masks and of the rows of an
    owner who has too many. `rows_per_owner`: if set the unit is an owner, of whom a step reads at
    most so many rows; None: it is an example."""

    clip_norm: float
    source: RandomSource
    rows_per_owner: int | None = None


def check_bounded(num_units: int, settings: LocalSettings) -> None:
    """Raises ValueError if a client has so many units that a float64 sum of their gradients is not
    bounded."""
    most = MOST_GRADIENTS * settings.batch_size
    if num_units > most:
        raise ValueError(
            f"this client has more examples than {MOST_GRADIENTS} * training.batch_size = {most}, "
            "beyond which a float64 sum of gradients is not bounded"
        )


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
    batch_size in L2, plus float64 rounding
    (`discreet.privacy.secure_grid.SecureSum.gradient_slack`). There is no sampling: every unit is
    in every step. Gradients are taken at `params` (num_params,); the model is not changed.

    Raises ValueError: as `check_bounded`. At a node that counts as no change, since the number of
    units is hidden.
    """
    if settings.failing != NOISE_ALONE:
        check_bounded(len(units_of(examples, clip.rows_per_owner)), settings)
    exact = copy.deepcopy(model).double()
    load_parameters(exact, params)
    to_train(exact)
    each = GradientOfUnit(exact, settings.loss, clip.clip_norm)
    if clip.rows_per_owner is None:
        table = examples.subset(torch.arange(len(examples)))
        inputs = _in_float64(table.inputs)
        units = rows_of(inputs, table.targets)
        together = partial(
            sequential_sum,
            exact,
            inputs,
            targets=table.targets,
            clip_norm=clip.clip_norm,
            loss=settings.loss,
        )
    else:
        owners = [*_owners(examples, clip.rows_per_owner, clip.source)]
        units = iter(owners)
        together = partial(_sum_over_owners, each, owners)
    with masks_from(clip.source, exact):
        total = clipped_total(together, each, units, failing=settings.failing)
    return total * (-settings.learning_rate / settings.batch_size)


def _owners(examples: Held, most: int, source: RandomSource) -> Iterator[Unit]:
    """The rows of each owner, in their own memory."""
    held = units_of(examples, most)
    everybody = held.drawn(torch.arange(len(held)), source.child("rows"))
    for inputs, targets in held.each(everybody):
        yield _in_float64(inputs), targets


def _sum_over_owners(each: GradientOfUnit, owners: Sequence[Unit]) -> Tensor:
    """The sum of the owners' clipped gradients, one owner after the other: adding or removing one
    does not change a single bit of the others'."""
    total = each.zero()
    for inputs, targets in owners:
        alone = torch.zeros(len(targets), dtype=torch.int64)
        total += clipped_sum_by_owner(
            each.model, (inputs, targets), alone, clip_norm=each.clip_norm, loss=each.loss
        )[0]
    return total


def _in_float64(inputs: Tensor) -> Tensor:
    if inputs.is_floating_point():
        return inputs.double()
    return inputs
