"""A step over all examples of all clients, of which each client makes its part: what secure aggregation adds up at
example level."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from discreet.data.examples import Examples
from discreet.models.dropout import masks_from
from discreet.models.models import load_parameters, to_train, trainable_part
from discreet.per_example.per_example import sequential_sum
from discreet.privacy.randomness import RandomSource
from discreet.training.local_training import LocalSettings


@torch.no_grad()
def shared_step(
    model: nn.Module, params: Tensor, examples: Examples, *, settings: LocalSettings, clip: tuple[float, RandomSource]
) -> Tensor:
    """A client's part of a step, (num_params,), float64: minus the learning rate times the sum of its clipped
    gradients over `batch_size`, a public constant. It is computed in float64 throughout, example by example, without
    noise.

    Sensitivity: adding, removing or zeroing out one example moves it by at most learning_rate * C / batch_size in L2,
    and what float64 rounds (`discreet.privacy.secure_grid.SecureSum.gradient_slack`). There is no sampling: every
    example is in every step. `params` (num_params,) is where it starts; the model is left as it is. `clip` is C, the
    norm that clips one example's gradient, and the source of the masks of dropout.
    """
    clip_norm, source = clip
    exact = copy.deepcopy(model).double()
    load_parameters(exact, params)
    to_train(exact)
    inputs = examples.inputs.double() if examples.inputs.is_floating_point() else examples.inputs
    with masks_from(source, exact):
        total = sequential_sum(exact, inputs, targets=examples.targets, clip_norm=clip_norm, loss=settings.loss)
    return trainable_part(exact, total) * (-settings.learning_rate / settings.batch_size)
