"""Local privacy: a client noises what it sends, so that not even the server has to be trusted.

The unit is all data of one client (`gaussian`, `laplace`) or one example of it (`laplace_step`); the adjacency is
replacing that unit by any other. Source: REFERENCES of the four systems that Discreet takes in, items 3 and 4; the
Gaussian is calibrated by Balle and Wang 2018, never by the classical formula.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from discreet.client.account import Refused
from discreet.privacy.calibration import epsilon_schedule
from discreet.privacy.clipping import clip_by_norm, clip_to_grid
from discreet.privacy.grid import grid_for
from discreet.privacy.mechanisms import (
    Gaussian,
    Laplace,
    analytic_gaussian_noise_multiplier,
    laplace_step_sensitivity,
)
from discreet.privacy.per_example import l1_clipped_gradient_sum
from discreet.privacy.randomness import RandomSource
from discreet.settings.client_settings import ClientSettings
from discreet.settings.privacy import PRIVACY_DRAWS
from discreet.tasks.dropout import masks_from
from discreet.tasks.examples import Examples
from discreet.tasks.models import flatten_parameters, to_train, trainable_part
from discreet.training.local_training import LocalSettings

if TYPE_CHECKING:
    from dp_accounting import DpEvent


@dataclass(frozen=True)
class LocalPrivacy:
    """One round's local mechanism: its kind, the norm that clips, and the noise over the sensitivity."""

    kind: str
    clip_norm: float
    noise_multiplier: float
    noise: str = "float"

    @property
    def mechanism(self) -> Gaussian | Laplace:
        """Gaussian noise for the L2 sensitivity, or Laplace noise for the L1 sensitivity."""
        if self.kind == "gaussian":
            return Gaussian(self.noise_multiplier, draws=PRIVACY_DRAWS.get(self.noise, 1))
        return Laplace(self.noise_multiplier)

    @property
    def event(self) -> DpEvent:
        """What one release costs, whether or not the round's cohort was sampled: the server sees who sends."""
        return self.mechanism.event()


def round_privacy(run: ClientSettings, *, round_number: int) -> LocalPrivacy | None:
    """The local mechanism of a round, or None if it is off.

    With `privacy.local.epsilon` the total is spread over the planned rounds by the schedule's shares w_t, which add up
    to 1. Laplace: epsilon_t = epsilon * w_t, and pure epsilons add. Gaussian: the rounds together are one Gaussian of
    multiplier z with z^-2 = sum of z_t^-2, so z_t = z / sqrt(w_t) spends (epsilon, delta) exactly at the last round.

    If clients rate models with local noise on their answers, each planned answer has its part of the total: 1 / z of a
    pure epsilon, or z^-2 of the Gaussian; the rounds share what is left.

    Raises:
      ValueError: `round_number` is beyond the planned rounds, where nothing is left.
      Refused: the answers alone pass the total.
    """
    local = run.local
    if local.kind == "none":
        return None
    if local.noise_multiplier is not None:
        return LocalPrivacy(local.kind, local.clip_norm, local.noise_multiplier, run.noise)
    if not 1 <= round_number <= run.rounds:
        raise ValueError(
            f"privacy.local.epsilon is spread over {run.rounds} rounds: nothing is left for {round_number}"
        )
    assert local.epsilon is not None
    share = epsilon_schedule(1.0, kind=local.schedule, rounds=run.rounds)[round_number - 1]
    gaussian, rating, times = local.kind == "gaussian", run.evaluation, sum(run.evaluation.ratings(run.rounds))
    power = 2 if gaussian else 1  # what adds up: z^-2 of Gaussian noise, 1 / z of Laplace noise
    whole = analytic_gaussian_noise_multiplier(local.epsilon, delta=run.delta) if gaussian else 1 / local.epsilon
    left = whole**-power - times * rating.noise_multiplier**-power
    if left <= 0:
        raise Refused(
            f"privacy.local.epsilon={local.epsilon:g} can't be reached with the ratings of models: {times} answers "
            f"with evaluation.noise_multiplier={rating.noise_multiplier:g} alone pass it"
        )
    return LocalPrivacy(local.kind, local.clip_norm, (left * share) ** (-1 / power), run.noise)


def release_update(update: Tensor, privacy: LocalPrivacy, *, source: RandomSource) -> Tensor:
    """Clips a whole update (num_params,) and noises it: kinds `gaussian` (L2) and `laplace` (L1).

    Guarantee: replacing all of the client's data moves the clipped update by at most 2 * clip_norm, and the noise is
    drawn for that. On the grid both hold in exact arithmetic. An update that is not finite is released as zero plus
    noise.
    """
    order, sensitivity = (2 if privacy.kind == "gaussian" else 1), 2 * privacy.clip_norm
    if privacy.noise != "grid":
        clipped, _ = clip_by_norm(update.unsqueeze(0), privacy.clip_norm, order=order)
        return privacy.mechanism.add_noise(clipped[0], sensitivity, source)
    grid = grid_for(
        privacy.clip_norm, len(update), largest_cohort=1, noise_scale=privacy.noise_multiplier * sensitivity
    )
    steps = clip_to_grid(update, privacy.clip_norm, grid=grid, order=order)
    return grid.to_float(privacy.mechanism.add_grid_noise(steps, sensitivity, grid=grid, source=source))


def release_step(
    model: nn.Module, examples: Examples, *, training: LocalSettings, privacy: LocalPrivacy, source: RandomSource
) -> Tensor:
    """One full-batch gradient step with Laplace noise from the model's parameters: kind `laplace_step`.

    Returns the update (num_params,).

    Guarantee: each example's gradient is clipped to an L1 norm of C, so replacing one example moves
    -learning_rate * mean(g_i) by at most 2 * learning_rate * C / n in L1, and the noise is drawn for that. n is the
    client's number of examples, which replacing leaves as it is. A client without examples releases zero.
    """
    if len(examples) == 0:
        return torch.zeros_like(flatten_parameters(model))
    to_train(model)
    inputs, targets, learning_rate = examples.inputs, examples.targets, training.learning_rate
    with masks_from(source, model):
        total, _ = l1_clipped_gradient_sum(
            model, inputs, targets=targets, clip_norm=privacy.clip_norm, loss=training.loss
        )
    step = -learning_rate * trainable_part(model, total) / len(examples)
    sensitivity = laplace_step_sensitivity(learning_rate, clip_norm=privacy.clip_norm, num_examples=len(examples))
    return privacy.mechanism.add_noise(step, sensitivity, source)
