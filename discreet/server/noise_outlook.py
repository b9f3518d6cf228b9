"""The noise outlook: says before a run spends anything if it can learn through its own noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from discreet.accounting.noise_ratio import (
    EARLY_ROUNDS,
    LARGEST_FEEDBACK,
    LARGEST_FEEDBACK_SHRINKING,
    noise_feedback,
    noise_ratio,
)
from discreet.server.plan import Plan
from discreet.server.server_optimizer import ServerSGD
from discreet.settings.rules import ConfigError


@dataclass(frozen=True)
class NoiseOutlook:
    """The expected effect of a run's noise.

    Attributes:
      ratio: the norm of a round's noise, in clip norms.
      feedback, limit: `noise_feedback` (docs/pitfalls.md), 0 if noise does not feed itself, and the largest with which
        a run learns.
      early: the run is over before the noise has grown: it is warned of, and not refused.
      remedies: numbers of clients, and of parameters, with which the feedback would be at its limit.
      fixed_norm: the setting of the clip norm if that is of an example's gradient, and never moves.
    """

    ratio: float
    feedback: float = 0.0
    limit: float = math.inf
    fixed_norm: str | None = None
    early: bool = False
    remedies: tuple[str, ...] = ()

    @property
    def loud(self) -> bool:
        """True if noise feedback is above its limit."""
        return self.feedback > self.limit

    @property
    def refused(self) -> bool:
        """True if the run will not learn, and is refused."""
        return self.loud and not self.early

    def __str__(self) -> str:
        if self.fixed_norm is not None:
            return (
                f"the noise in a step's mean gradient is expected to be {self.ratio:.3g} times as long as "
                f"{self.fixed_norm}, which does not move: noise does not drive the model"
            )
        said = f"a round's noise is expected to be {self.ratio:.3g} times as long as the clip norm"
        if self.loud:
            said += f", and will drive the model: {self.feedback:.3g}, above {self.limit:g} (docs/pitfalls.md)"
        if self.loud and self.early:
            said += f". A run of {EARLY_ROUNDS} rounds or fewer is not refused; take {', or '.join(self.remedies)}"
        return said


def noise_outlook(plan: Plan) -> NoiseOutlook:
    """Of the noise of a plan."""
    mechanism, optimizer = plan.mechanism, plan.optimizer
    if mechanism is None:
        return NoiseOutlook(0.0)
    ratio = noise_ratio(mechanism.sum_noise, num_params=plan.num_params, expected_cohort=mechanism.averaged)
    if mechanism.fixed_norm is not None or not isinstance(optimizer, ServerSGD):
        # Each step of Adam and Yogi is divided by its own size, noise included: noise does not feed itself.
        return NoiseOutlook(ratio, fixed_norm=mechanism.fixed_norm)
    training, work = plan.run.training, math.inf
    # Adam's steps are as long as the learning rate says, however small gradients are: local work is taken to be full.
    if training.optimizer == "sgd":
        work = training.epochs * training.learning_rate / (1 - training.momentum)
    feedback = noise_feedback(
        ratio, learning_rate=optimizer.learning_rate, momentum=optimizer.momentum, local_work=work
    )
    if plan.clip.kind != "adaptive":
        return NoiseOutlook(ratio, feedback)
    limit = LARGEST_FEEDBACK_SHRINKING if optimizer.shrink_with_noise else LARGEST_FEEDBACK
    excess = max(1.0, feedback / limit)
    remedies = (
        f"a population of {math.ceil(plan.run.user.population_size * excess)} clients",
        f"a model of {math.floor(plan.num_params / excess**2)} parameters",
    )
    return NoiseOutlook(ratio, feedback, limit, early=plan.run.rounds <= EARLY_ROUNDS, remedies=remedies)


def check_noise(plan: Plan, of_rounds: Callable[[int], Plan]) -> None:
    """Raises ConfigError if a run will not learn, with settings that will, unless it is told to warn or has begun
    already. `of_rounds`: the plan of the same settings with so many rounds, in which a target is met anew."""
    if plan.resume or plan.too_noisy == "warn":
        return
    outlook = noise_outlook(plan)
    if outlook.refused:
        remedies = ", or ".join(_remedies(plan, outlook, of_rounds))
        raise ConfigError(
            f"these settings will not learn: {outlook}; take {remedies}; privacy.user.too_noisy=warn runs all the same"
        )


def _remedies(plan: Plan, outlook: NoiseOutlook, of_rounds: Callable[[int], Plan]) -> Iterator[str]:
    rounds, optimizer = plan.run.rounds, plan.optimizer
    while noise_outlook(of_rounds(rounds)).refused:
        rounds = max(EARLY_ROUNDS, rounds // 2)
    yield f"rounds={rounds}"
    shrinks = isinstance(optimizer, ServerSGD) and optimizer.shrink_with_noise
    if not shrinks and outlook.feedback <= LARGEST_FEEDBACK_SHRINKING:
        yield "server.shrink_with_noise=true"
    yield from outlook.remedies
