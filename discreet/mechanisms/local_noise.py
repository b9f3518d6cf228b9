"""Local privacy: a client noises its whole update, so that not even the server has to be trusted.

The Gaussian is calibrated as in Balle and Wang 2018, never by the classical formula.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from discreet.accounting.events import ACCOUNTANTS, PLD
from discreet.mechanisms.client_noise import LocalPrivacy, OwnNoise
from discreet.mechanisms.mechanism import (
    CLIENTS,
    PURE,
    ClientRound,
    ExpectedNoise,
    Participation,
    Statement,
    Unreachable,
    unnoised_at_server,
)
from discreet.mechanisms.round_state import Released
from discreet.settings.adjacency import LOCAL
from discreet.settings.client_settings import ClientSettings
from discreet.settings.clip_choice import CLIP, ClipConfig
from discreet.settings.privacy import PLANNED, Sizes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from discreet.data.examples import Examples
    from discreet.mechanisms.round_state import RoundState
    from discreet.mechanisms.sums import AnswerRelease, CohortSum, Replies
    from discreet.privacy.randomness import RandomSource
    from discreet.training.local_training import LocalSettings

LOCAL_SETTINGS = ("kind", "epsilon", "noise_multiplier", "clip_norm")
EXAMPLES = "one example of one client"
COUNT = "its number of examples"
WHOLE = "all data of one client"
CLIPPED = "the update is clipped in {} noise for 2 * clip_norm at the client"
# For each kind of noise: the unit, the mechanism, and what is not covered.
SAID: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "none": (WHOLE, "none", ()),
    "gaussian": (WHOLE, CLIPPED.format("L2, Gaussian"), ()),
    "laplace": (WHOLE, CLIPPED.format("L1, Laplace"), ()),
    "laplace_step": (
        EXAMPLES,
        "one full-batch step, L1 clipping per example, Laplace noise for 2 * eta * C / n",
        (COUNT,),
    ),
}


@dataclass(frozen=True)
class LocalNoise:
    """Hides all data of one client, or with `laplace_step` one of its examples, from everybody
    else; only the client itself is trusted.

    Attributes:
      run, clip, sizes: as `CentralGaussian` has them.
    """

    run: ClientSettings
    clip: ClipConfig = CLIP
    sizes: Sizes = PLANNED
    guarantee: ClassVar[str] = LOCAL
    charged_at: ClassVar[frozenset[str]] = frozenset((CLIENTS,))

    def statement(self) -> Statement:
        asked = self.run.evaluation
        rated = ""
        priced = ""
        if asked.private:
            rated = (
                f"; the client rates the model every {asked.every} rounds and at the end, its "
                "answer clipped and noised the same way for twice its largest norm, with the "
                f"noise multiplier {asked.noise_multiplier:g}"
            )
            priced = " and another for each answer"
        unit, how, uncovered = SAID[self.run.local.kind]
        is_counted = self.run.example.enabled and self.run.data.public_num_examples is None
        if is_counted and not uncovered:
            uncovered = (COUNT,)  # DP-SGD's epsilon and steps show it
        return Statement(
            unit=unit,
            adjacency="replace",
            trusted="only the client itself",
            observer="everybody else, including the server",
            mechanism=how + rated,
            accounting="a Gaussian or Laplace event for each round in which the client takes "
            f"part{priced}, over every run in its ledger",
            not_covered=("that a client took part, and so that its data could be read", *uncovered),
        )

    @property
    def price_settings(self) -> Mapping[str, object]:
        return {f"privacy.local.{name}": getattr(self.run.local, name) for name in LOCAL_SETTINGS}

    @property
    def accountants(self) -> tuple[str, ...]:
        if self.run.local.kind in ("laplace", "laplace_step"):
            return (*ACCOUNTANTS, PURE)
        return ACCOUNTANTS

    @property
    def participation(self) -> Participation:
        if self.run.local.kind == "laplace_step":
            step = "privacy.local.kind=laplace_step"
        else:
            step = None
        return Participation(one_by_one=step)

    def expected_noise(self, clip_norm: float) -> ExpectedNoise:
        from discreet.privacy.grid import grid_slack, laplace_grid_slack
        from discreet.privacy.rounded_sums import laplace_slack

        if self.run.local.kind == "laplace_step":
            in_steps = unnoised_at_server(self.run)
            return replace(in_steps, slack=lambda values, _: laplace_slack(values), sums="rounded")
        slacks = {"gaussian": grid_slack, "laplace": laplace_grid_slack}
        if self.run.noise == "grid":
            slack = slacks.get(self.run.local.kind)
        else:
            slack = None
        return replace(unnoised_at_server(self.run), slack=slack)

    def event(self, number: int, *, again: bool = False) -> None:
        """None: clients pay for their own releases."""

    @property
    def answers(self) -> AnswerRelease:
        from discreet.mechanisms.sums import rating_release

        return rating_release(self.run, self.sizes, own=answer_noise(self.run, self.sizes.l1_norm))

    def at_client(self, number: int, num_examples: int, *, trains: bool) -> ClientRound:
        if not trains:
            return ClientRound(math.inf)
        privacy = round_privacy(self.run, round_number=number)
        found = ClientRound(privacy.noise_multiplier, ((privacy.event, 1),), local=privacy)
        if self.run.local.kind != "laplace_step":
            return found

        def step(model: nn.Module, params: Tensor, examples: Examples, **how: Any) -> Tensor:
            from discreet.models.models import load_parameters

            load_parameters(model, params)
            return release_step(
                model,
                examples,
                training=how["settings"],
                privacy=privacy,
                source=how["source"].child("local"),
            )

        return replace(found, local=None, step=step)

    def add_up(self, replies: Replies, state: RoundState) -> CohortSum:
        from discreet.mechanisms.sums import AnswerSum, add_up_unnoised, rating_release

        answers = None
        if state.round + 1 in self.run.evaluation.rating_rounds:
            own = answer_noise(self.run, self.sizes.l1_norm)
            answers = AnswerSum(rating_release(self.run, self.sizes, own=own))
        return add_up_unnoised(replies, state, answers)

    def release(self, summed: CohortSum, state: RoundState, source: RandomSource) -> Released:
        """The sum unchanged: clients have noised it."""
        from discreet.mechanisms.sums import release_unnoised

        return release_unnoised(summed, state, source)


def answer_noise(run: ClientSettings, l1_norm: float = 1.0) -> OwnNoise:
    """The noise that a client draws on its own answers, of at most this L1 norm."""
    noise = LocalPrivacy(run.local.kind, 1.0, run.evaluation.noise_multiplier, run.noise)
    return OwnNoise(noise).within(l1_norm)


def round_privacy(run: ClientSettings, *, round_number: int) -> LocalPrivacy:
    """The local mechanism of a round.

    With `privacy.local.epsilon` the total is spread over the planned rounds by the schedule's
    shares w_t, which add up to 1. Laplace: epsilon_t = epsilon * w_t, and pure epsilons add.
    Gaussian: the rounds together are one Gaussian of multiplier z with z^-2 = sum of z_t^-2, so z_t
    = z / sqrt(w_t) spends (epsilon, delta), by the run's own accountant, at the last round.

    If clients rate models with local noise on their answers, each planned answer takes its part of
    the total: 1 / z of a pure epsilon, or z^-2 of the Gaussian. The rounds share the rest.

    Raises:
      ValueError: `round_number` is beyond the planned rounds, where nothing is left.
      Unreachable: the answers alone pass the total, or no noise meets it.
    """
    local = run.local
    if local.noise_multiplier is not None:
        return LocalPrivacy(local.kind, local.clip_norm, local.noise_multiplier, run.noise)
    from discreet.accounting.calibration import epsilon_schedule  # not where nothing is local

    if not 1 <= round_number <= run.rounds:
        raise ValueError(
            f"privacy.local.epsilon is spread over {run.rounds} rounds, so none is "
            f"left for round {round_number}"
        )
    assert local.epsilon is not None
    share = epsilon_schedule(1.0, kind=local.schedule, rounds=run.rounds)[round_number - 1]
    gaussian = local.kind == "gaussian"
    rating = run.evaluation
    times = sum(run.evaluation.ratings(run.rounds))
    # the quantity that adds up: z^-2 of Gaussian noise, 1 / z of Laplace noise
    if gaussian:
        power = 2
    else:
        power = 1
    if gaussian:
        whole = _gaussian_for(local.epsilon, run.delta, run.accountant)
    else:
        whole = 1 / local.epsilon
    left = whole**-power - times * rating.noise_multiplier**-power
    if left <= 0:
        raise Unreachable(
            f"privacy.local.epsilon={local.epsilon:g} can't be reached with the "
            f"ratings of models: {times} answers with "
            f"evaluation.noise_multiplier={rating.noise_multiplier:g} alone exceed it"
        )
    return LocalPrivacy(local.kind, local.clip_norm, (left * share) ** (-1 / power), run.noise)


@lru_cache(maxsize=64)
def _gaussian_for(epsilon: float, delta: float, accountant: str) -> float:
    """The noise multiplier of one Gaussian that costs `epsilon` by an accountant. Raises
    Unreachable: there is none.

    With the PLD accountant it is the analytic multiplier. RDP gives a larger epsilon for the same
    noise, and a run that uses RDP must meet that epsilon.
    """
    from discreet.accounting.calibration import noise_multiplier_for_epsilon
    from discreet.privacy.mechanisms import Gaussian, analytic_gaussian_noise_multiplier

    if accountant == PLD:
        return analytic_gaussian_noise_multiplier(epsilon, delta=delta)
    try:
        return noise_multiplier_for_epsilon(
            epsilon,
            releases=lambda noise: ((Gaussian(noise).event(), 1),),
            delta=delta,
            accountant=accountant,
        )
    except ValueError as error:
        raise Unreachable(f"privacy.local.epsilon={epsilon:g} can't be reached: {error}") from error


def release_step(
    model: nn.Module,
    examples: Examples,
    *,
    training: LocalSettings,
    privacy: LocalPrivacy,
    source: RandomSource,
) -> Tensor:
    """One full-batch gradient step with Laplace noise from the model's parameters: kind
    `laplace_step`.

    Returns the update (num_params,).

    Guarantee: each example's gradient is clipped to an L1 norm of C, so replacing one example moves
    -learning_rate * mean(g_i) by at most 2 * learning_rate * C / n in L1, and the noise is drawn
    for that. n is the client's number of examples, which replacement does not change. A client
    without examples releases zero.
    """
    import torch

    from discreet.models.models import flatten_parameters, masks_from, to_train
    from discreet.per_example.own_code import memory_for
    from discreet.per_example.per_example import l1_clipped_gradient_sum
    from discreet.training.failing_units import GradientOfUnit, clipped_total, rows_of

    if len(examples) == 0:
        return torch.zeros_like(flatten_parameters(model))
    to_train(model)
    inputs = examples.inputs
    targets = examples.targets
    learning_rate = training.learning_rate
    clip_norm = privacy.clip_norm
    loss = training.loss

    def together() -> Tensor:
        total, _ = l1_clipped_gradient_sum(
            model, inputs, targets=targets, clip_norm=clip_norm, loss=loss
        )
        return total

    memory = memory_for(model.modules(), loss)
    each = GradientOfUnit(model, loss, clip_norm, order=1, memory=memory)
    with masks_from(source, model):
        total = clipped_total(together, each, rows_of(inputs, targets), failing=training.failing)
    step = -learning_rate * total / len(examples)
    return privacy.mechanism.add_noise(
        step, 2 * learning_rate * privacy.clip_norm / len(examples), source
    )
