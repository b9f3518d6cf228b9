"""A client's part of a step over all examples of all clients, for secure aggregation at example
level."""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import Tensor, nn

from discreet.data.examples import Examples
from discreet.models.models import load_parameters, masks_from, to_train
from discreet.per_example.per_example import sequential_sum
from discreet.privacy.randomness import RandomSource
from discreet.training.failing_units import GradientOfUnit, clipped_total, rows_of
from discreet.training.local_training import LocalSettings


@torch.no_grad()
def shared_step(
    model: nn.Module,
    params: Tensor,
    examples: Examples,
    *,
    settings: LocalSettings,
    clip: tuple[float, RandomSource],
) -> Tensor:
    """A client's part of a step over all examples of all clients, (num_params,), float64, for
    secure aggregation at example level: minus the learning rate times the sum of its clipped
    gradients over `batch_size`, a public constant. It is computed in float64 throughout, example by
    example, without noise.

    Sensitivity: adding, removing or zeroing out one example moves it by at most learning_rate * C /
    batch_size in L2, plus float64 rounding
    (`discreet.privacy.secure_grid.SecureSum.gradient_slack`). There is no sampling: every example
    is in every step. Gradients are taken at `params` (num_params,); the model is not changed.
    `clip` is C, the clip norm of an example's gradient, and the source of dropout masks.
    """
    clip_norm, source = clip
    loss = settings.loss
    exact = copy.deepcopy(model).double()
    load_parameters(exact, params)
    to_train(exact)
    if examples.inputs.is_floating_point():
        inputs = examples.inputs.double()
    else:
        inputs = examples.inputs
    targets = examples.targets
    together = partial(
        sequential_sum, exact, inputs, targets=targets, clip_norm=clip_norm, loss=loss
    )
    each = GradientOfUnit(exact, loss, clip_norm)
    with masks_from(source, exact):
        total = clipped_total(together, each, rows_of(inputs, targets), failing=settings.failing)
    return total * (-settings.learning_rate / settings.batch_size)
