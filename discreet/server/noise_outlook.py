"""The noise outlook: says before a run spends anything if it can learn through its own noise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from discreet.accounting.noise_ratio import (
    EARLY_ROUNDS,
    LARGEST_FEEDBACK_SHRINKING,
    largest_feedback,
    noise_feedback,
    noise_ratio,
)
from discreet.server.guarantees import resolve_noise, server_mechanism
from discreet.server.server_optimizer import ServerSGD, server_optimizer
from discreet.settings.rules import ConfigError
from discreet.settings.run_config import RunConfig


@dataclass(frozen=True)
class NoiseOutlook:
    """The expected effect of a run's noise.

    Attributes:
      ratio: the norm of a round's noise, in clip norms (`noise_ratio.noise_ratio`).
      feedback: see `noise_ratio.noise_feedback` and docs/pitfalls.md; 0 with Adam and Yogi, and if clients share a step
        at example level.
      limit: the largest feedback with which such a run learns.
      early: whether the run is over before the noise has grown: it is warned of, and not refused.
      remedies: numbers of clients, and of parameters, with which the feedback would be at its limit.
      fixed_norm: the setting of the clip norm if that is of an example's gradient, and never moves: the noise is then
        that of the gradients' mean.
    """

    ratio: float
    feedback: float
    limit: float
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
        if not self.loud:
            return said
        said = f"{said}, and will drive the model: {self.feedback:.3g}, above {self.limit:g} (docs/pitfalls.md)"
        if not self.early:
            return said
        return f"{said}. A run of {EARLY_ROUNDS} rounds or fewer is not refused; take {', or '.join(self.remedies)}"


def noise_outlook(config: RunConfig, *, num_params: int) -> NoiseOutlook:
    """Of a configuration whose noise is resolved, and a model of so many parameters."""
    mechanism, optimizer = server_mechanism(config), server_optimizer(config.server)
    if mechanism is None:
        return NoiseOutlook(0.0, 0.0, math.inf)
    ratio = noise_ratio(mechanism.noise_in_sum, num_params=num_params, expected_cohort=mechanism.averaged)
    if mechanism.fixed_norm is not None:
        return NoiseOutlook(ratio, 0.0, math.inf, mechanism.fixed_norm)
    if not isinstance(optimizer, ServerSGD):
        # Each step of Adam and Yogi is divided by its own size, noise included: noise does not feed itself.
        return NoiseOutlook(ratio, 0.0, math.inf)
    training, user = config.training, config.privacy.user
    # Adam's steps are as long as the learning rate says, however small gradients are: local work is taken to be full.
    full = training.optimizer != "sgd"
    work = math.inf if full else training.epochs * training.learning_rate / (1 - training.momentum)
    feedback = noise_feedback(
        ratio, learning_rate=optimizer.learning_rate, momentum=optimizer.momentum, local_work=work
    )
    if user.clip.kind != "adaptive":
        return NoiseOutlook(ratio, feedback, math.inf)
    limit = largest_feedback(shrinking=optimizer.shrink_with_noise)
    excess = max(1.0, feedback / limit)
    remedies = (
        f"a population of {math.ceil(config.population_size * excess)} clients",
        f"a model of {math.floor(num_params / excess**2)} parameters",
    )
    return NoiseOutlook(ratio, feedback, limit, early=config.rounds <= EARLY_ROUNDS, remedies=remedies)


def check_noise(asked: RunConfig, *, num_params: int, resolved: RunConfig | None = None) -> None:
    """Refuses a run that will not learn, unless it is told to warn or has begun already.

    Args:
      asked: as it was given, so that a target may be met with other rounds.
      num_params: of its model.
      resolved: the same with its noise resolved, if that was done before.

    Raises:
      ConfigError: the run will not learn; the message names settings that will.
    """
    if asked.resume or asked.privacy.user.too_noisy == "warn":
        return
    outlook = noise_outlook(resolved or resolve_noise(asked), num_params=num_params)
    if outlook.refused:
        remedies = ", or ".join(_remedies(asked, outlook, num_params))
        raise ConfigError(
            f"these settings will not learn: {outlook}; take {remedies}; privacy.user.too_noisy=warn runs all the same"
        )


def _remedies(asked: RunConfig, outlook: NoiseOutlook, num_params: int) -> Iterator[str]:
    """One change each that brings the run within its limit."""
    rounds = asked.rounds
    while noise_outlook(resolve_noise(replace(asked, rounds=rounds)), num_params=num_params).refused:
        rounds = max(EARLY_ROUNDS, rounds // 2)
    yield f"rounds={rounds}"
    if not asked.server.shrink_with_noise and outlook.feedback <= LARGEST_FEEDBACK_SHRINKING:
        yield "server.shrink_with_noise=true"
    yield from outlook.remedies
