"""Whether a run can learn through its own noise: said before it spends anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from discreet.accounting.noise_ratio import (
    EARLY_ROUNDS,
    LARGEST_DRIVE_SHRINKING,
    largest_drive,
    noise_drive,
    noise_ratio,
)
from discreet.server.plan import Plan
from discreet.server.server_optimizer import ServerSGD
from discreet.settings.rules import ConfigError


@dataclass(frozen=True)
class NoiseOutlook:
    """What is expected of a run's noise.

    Attributes:
      ratio: the norm of a round's noise, in clip norms (`noise_ratio.noise_ratio`).
      drive: how strongly it drives the model (`noise_ratio.noise_drive`); 0 with Adam and Yogi, and if clients share a
        step at example level, see docs/pitfalls.md.
      limit: the largest drive with which such a run learns.
      early: whether the run is over before the noise has grown: it is warned of, and not refused.
      remedies: numbers of clients, and of parameters, with which the drive would be at its limit.
      fixed_norm: the setting of the clip norm if that is of an example's gradient, and never moves: the noise is then
        that of the gradients' mean.
    """

    ratio: float
    drive: float
    limit: float
    fixed_norm: str | None = None
    early: bool = False
    remedies: tuple[str, ...] = ()

    @property
    def loud(self) -> bool:
        """Whether noise drives the model."""
        return self.drive > self.limit

    @property
    def drowned(self) -> bool:
        """Whether the run will not learn."""
        return self.loud and not self.early

    def __str__(self) -> str:
        if self.fixed_norm is not None:
            return (
                f"the noise in a step's mean gradient is expected to be {self.ratio:.3g} times as long as "
                f"{self.fixed_norm}, which does not move: noise does not drive the model"
            )
        said = f"a round's noise is expected to be {self.ratio:.3g} times as long as the clip norm"
        if not self.loud:
            return said
        said = f"{said}, and will drive the model: {self.drive:.3g}, above {self.limit:g} (docs/pitfalls.md)"
        if not self.early:
            return said
        return f"{said}. A run of {EARLY_ROUNDS} rounds or fewer is not refused; take {', or '.join(self.remedies)}"


def noise_outlook(plan: Plan) -> NoiseOutlook:
    """Of the noise of a plan."""
    mechanism, optimizer = plan.mechanism, plan.optimizer
    if mechanism is None:
        return NoiseOutlook(0.0, 0.0, math.inf)
    ratio = noise_ratio(mechanism.noise_in_sum, num_params=plan.num_params, expected_cohort=mechanism.averaged)
    if mechanism.fixed_norm is not None:
        return NoiseOutlook(ratio, 0.0, math.inf, mechanism.fixed_norm)
    if not isinstance(optimizer, ServerSGD):
        # Each step of Adam and Yogi is divided by its own size, noise included: noise does not feed itself.
        return NoiseOutlook(ratio, 0.0, math.inf)
    training = plan.run.training
    # Adam's steps are as long as the learning rate says, however small gradients are: local work is taken to be full.
    full = training.optimizer != "sgd"
    work = math.inf if full else training.epochs * training.learning_rate / (1 - training.momentum)
    drive = noise_drive(ratio, learning_rate=optimizer.learning_rate, momentum=optimizer.momentum, local_work=work)
    if plan.clip.kind != "adaptive":
        return NoiseOutlook(ratio, drive, math.inf)
    limit = largest_drive(shrinking=optimizer.shrink_with_noise)
    excess = max(1.0, drive / limit)
    remedies = (
        f"a population of {math.ceil(plan.run.user.population_size * excess)} clients",
        f"a model of {math.floor(plan.num_params / excess**2)} parameters",
    )
    return NoiseOutlook(ratio, drive, limit, early=plan.run.rounds <= EARLY_ROUNDS, remedies=remedies)


def check_noise(plan: Plan, of_rounds: Callable[[int], Plan]) -> None:
    """Refuses a run that will not learn, unless it is told to warn or has begun already. `of_rounds`: the plan of the
    same settings with so many rounds, in which a target is met anew.

    Raises:
      ConfigError: the run will not learn; the message names settings that will.
    """
    if plan.resume or plan.too_noisy == "warn":
        return
    outlook = noise_outlook(plan)
    if outlook.drowned:
        remedies = ", or ".join(_remedies(plan, outlook, of_rounds))
        raise ConfigError(
            f"these settings will not learn: {outlook}; take {remedies}; privacy.user.too_noisy=warn runs all the same"
        )


def _remedies(plan: Plan, outlook: NoiseOutlook, of_rounds: Callable[[int], Plan]) -> Iterator[str]:
    """One change each that brings the run within its limit."""
    rounds = plan.run.rounds
    while noise_outlook(of_rounds(rounds)).drowned:
        rounds = max(EARLY_ROUNDS, rounds // 2)
    yield f"rounds={rounds}"
    shrinks = isinstance(plan.optimizer, ServerSGD) and plan.optimizer.shrink_with_noise
    if not shrinks and outlook.drive <= LARGEST_DRIVE_SHRINKING:
        yield "server.shrink_with_noise=true"
    yield from outlook.remedies
