"""One full-batch gradient step a round, with Laplace noise that the client adds for one of its examples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from discreet.mechanisms.local_noise import EPSILONS, LOCAL_SETTINGS, LocalPrivacy, local_statement, round_privacy
from discreet.mechanisms.mechanism import ClientRound, Mechanism, Statement
from discreet.settings.client_settings import ClientSettings
from discreet.settings.privacy import LOCAL

if TYPE_CHECKING:
    from torch import Tensor, nn

    from discreet.data.examples import Examples
    from discreet.privacy.randomness import RandomSource
    from discreet.training.local_training import LocalSettings


@dataclass(frozen=True)
class LaplaceStep(Mechanism):
    """One example of one client, from everybody else; nobody but the client itself is trusted."""

    run: ClientSettings
    guarantee: ClassVar[str] = LOCAL
    at_client: ClassVar[bool] = True
    unbatched: ClassVar[str] = "privacy.local.kind=laplace_step"
    reported: ClassVar[tuple[str, ...]] = EPSILONS
    deciding: ClassVar[tuple[str, ...]] = LOCAL_SETTINGS

    def statement(self, *, account: bool = False) -> Statement:
        how = "one full-batch step, L1 clipping per example, Laplace noise for 2 * eta * C / n"
        unit, uncovered = "one example of one client", ("its number of examples",)
        return local_statement(self.run, unit=unit, mechanism=how, uncovered=uncovered)

    def client_round(self, number: int, num_examples: int, *, trains: bool) -> ClientRound:
        if not trains:
            return ClientRound(math.inf)
        privacy = round_privacy(self.run, round_number=number)

        def step(
            model: nn.Module, params: Tensor, examples: Examples, *, settings: LocalSettings, source: RandomSource
        ) -> Tensor:
            from discreet.models.models import load_parameters

            load_parameters(model, params)
            return release_step(model, examples, training=settings, privacy=privacy, source=source.child("local"))

        return ClientRound(privacy.noise_multiplier, ((privacy.event, 1),), step=step)


def release_step(
    model: nn.Module, examples: Examples, *, training: LocalSettings, privacy: LocalPrivacy, source: RandomSource
) -> Tensor:
    """One full-batch gradient step with Laplace noise from the model's parameters: kind `laplace_step`.

    Returns the update (num_params,).

    Guarantee: each example's gradient is clipped to an L1 norm of C, so replacing one example moves
    -learning_rate * mean(g_i) by at most 2 * learning_rate * C / n in L1, and the noise is drawn for that. n is the
    client's number of examples, which replacing leaves as it is. A client without examples releases zero.
    """
    import torch

    from discreet.models.dropout import masks_from
    from discreet.models.models import flatten_parameters, to_train
    from discreet.per_example.per_example import l1_clipped_gradient_sum

    if len(examples) == 0:
        return torch.zeros_like(flatten_parameters(model))
    to_train(model)
    inputs, targets, learning_rate = examples.inputs, examples.targets, training.learning_rate
    with masks_from(source, model):
        total, _ = l1_clipped_gradient_sum(
            model, inputs, targets=targets, clip_norm=privacy.clip_norm, loss=training.loss
        )
    step = -learning_rate * total / len(examples)
    return privacy.mechanism.add_noise(step, 2 * learning_rate * privacy.clip_norm / len(examples), source)
