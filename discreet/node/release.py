"""What leaves a client with noise of its own: an update or a step at local level, an answer, and the vector that goes
into a masked sum.

The unit at local level is all data of one client (`gaussian`, `laplace`) or one example of it (`laplace_step`); the
adjacency is replacing that unit by any other. Source: REFERENCES of the four systems that Discreet takes in, items 3
and 4; the Gaussian is calibrated by Balle and Wang 2018, never by the classical formula.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from discreet.accounting.calibration import epsilon_schedule
from discreet.data.examples import Examples
from discreet.models.dropout import masks_from
from discreet.models.models import flatten_parameters, to_train, trainable_part
from discreet.node.account import Refused
from discreet.per_example.per_example import l1_clipped_gradient_sum
from discreet.privacy.clipping import clip_by_norm, clip_to_grid
from discreet.privacy.grid import grid_for
from discreet.privacy.mechanisms import Gaussian, Laplace, analytic_gaussian_noise_multiplier, laplace_step_sensitivity
from discreet.privacy.randomness import RandomSource
from discreet.privacy.secure_grid import SecureSum
from discreet.protocol.messages import TrainRequest
from discreet.queries.query import Query
from discreet.settings.client_settings import ClientSettings
from discreet.settings.privacy import PRIVACY_DRAWS
from discreet.training.local_training import LocalSettings

if TYPE_CHECKING:
    from dp_accounting import DpEvent

LAPLACE = "laplace"  # the local noise that is drawn for an L1 norm


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
        """The cost of one release. Sampling of cohorts does not lower it: the server sees who sends."""
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


@dataclass(frozen=True)
class OwnNoise:
    """The noise of a client on its own answer, for one of its examples.

    Guarantee (zero-out: one example contributes nothing, and how many there are stays): an answer is the mean, over m
    held-out examples, of vectors of L2 norm at most 1 (`client_settings.MEANS`), so one of them moves it by at most
    1 / m, and the noise is drawn for that. The release is one Gaussian of `noise_multiplier`, whoever is in the cohort:
    the server sees who answers.
    """

    noise_multiplier: float
    draws: int = 1

    @property
    def event(self) -> DpEvent:
        """The cost of one answer to each held-out example."""
        return Gaussian(self.noise_multiplier, draws=self.draws).event()

    def noised(self, answer: Tensor, held_out: int, source: RandomSource) -> Tensor:
        """An answer (length,) about `held_out` examples as it leaves: (length + 1,), float32, whose last number is the
        variance of the noise on each of the others. The variance follows from `held_out`, which zero-out does not hide.
        A client that holds nothing out sends zeros, as one that is missing."""
        if held_out == 0:
            return torch.zeros(len(answer) + 1)
        mechanism, sensitivity = Gaussian(self.noise_multiplier, draws=self.draws), 1 / held_out
        noised = mechanism.add_noise(answer.double(), sensitivity, source.child("answer"))
        return _with_variance(noised, mechanism.stddev(sensitivity) ** 2)


@dataclass(frozen=True)
class LocalNoise:
    """The noise of a client on its own answer, for all of its data.

    Guarantee (replace): an answer is clipped to a norm that it can't pass anyway, in L2 for Gaussian noise and in L1
    for Laplace noise, so other data of this client move it by at most twice that norm. The noise is drawn for that
    (`release_update`), whoever is in the cohort, and on the zeros of a client that holds nothing out too: the number of
    examples that a client holds is hidden with the rest.
    """

    privacy: LocalPrivacy

    @property
    def event(self) -> DpEvent:
        """The cost of one answer to the client."""
        return self.privacy.event

    def noised(self, answer: Tensor, held_out: int, source: RandomSource) -> Tensor:
        """As `OwnNoise.noised`, but that the variance is a public constant, and `held_out` decides nothing."""
        sent = release_update(answer.to(torch.float32), self.privacy, source=source.child("answer"))
        scale = 2 * self.privacy.clip_norm * self.privacy.noise_multiplier
        return _with_variance(sent.double(), 2 * scale**2 if self.privacy.kind == LAPLACE else scale**2)


def _with_variance(noised: Tensor, variance: float) -> Tensor:
    return torch.cat([noised, torch.tensor([variance], dtype=torch.float64)]).to(torch.float32)


def own_noise(run: ClientSettings, query: Query | None = None) -> OwnNoise | LocalNoise | None:
    """The noise that each client draws on its own answers; None if the server does. `query` may be left out if only the
    event matters, which is the same for each."""
    if not run.rates_itself:
        return None
    noise_multiplier, kind = run.evaluation.noise_multiplier, run.local.kind
    if kind == "none":
        return OwnNoise(noise_multiplier, PRIVACY_DRAWS.get(run.noise, 1))
    norm = query.l1_norm if query is not None and kind == LAPLACE else 1.0
    return LocalNoise(LocalPrivacy(kind, norm, noise_multiplier, run.noise))


@dataclass(frozen=True, eq=False)
class Values:
    """The exact results of a client. They have no form that travels: they go into `noised_vector` if the run is under
    secure aggregation, and into a `TrainReply`, whose fields these are, otherwise."""

    update: Tensor
    below: bool = False
    answer: Tensor | None = None


def noised_vector(vector: SecureSum, values: Values, request: TrainRequest, source: RandomSource) -> Tensor:
    """A client's vector, int64 (length,), noise included: this is masked, and nothing else.

    The noise is the client's share: the shares of `vector.summands` clients are what the release is accounted with, and
    no client's share is enough by itself.

    Args:
      values: before they are put on the grid.
      source: the client's own, of this round.
    """
    if vector.largest_sum:
        encoded = vector.encode_gradients(values.update, request.run.step_norm)
        return encoded + vector.noise(source.child("secure", "step"))
    trains, query = request.work.trains, request.work.query
    encoded = vector.encode(
        values.update if trains else None,
        request.clip_norm,
        below=values.below if trains and vector.bit_steps else None,
        answer=values.answer if query else None,
    )
    return encoded + vector.noise(source.child("secure", "update" if trains else query))
