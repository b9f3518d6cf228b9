"""The outlook for a linear model of a table: how far noise alone moves its outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from discreet.planning.linear_model import LinearModel
from discreet.planning.plan import Plan
from discreet.planning.server_optimizer import ServerSGD

# The standard deviation of a logit by noise alone, above which it drives a linear model; and the
# fewest times that the steps of a run must cover the way to the intercept.
LOUD_LOGIT = 2.0
LEAST_REACH = 1.0


def parameter_noise(plan: Plan, optimizer: ServerSGD, rounds: int) -> float:
    """The standard deviation of each parameter that noise alone has after so many rounds with a
    fixed clip norm: an upper estimate, since what data pull back is left out."""
    noise = plan.mechanism.expected_noise(plan.first_clip_norm)
    one_round = noise.multiplier * noise.norm / noise.denominator
    return one_round * math.sqrt(rounds) * optimizer.learning_rate / (1 - optimizer.momentum)


def output_noise(plan: Plan, model: LinearModel, optimizer: ServerSGD) -> float:
    """The standard deviation of an output of a linear model that noise alone has after all rounds,
    for a row of expected norm."""
    return model.moved(parameter_noise(plan, optimizer, plan.run.rounds))


def reach(plan: Plan, model: LinearModel, optimizer: ServerSGD) -> float:
    """The number of times that all steps of a linear model's intercept cover the way to its
    optimum."""
    training = plan.run.training
    steps = plan.run.rounds * optimizer.learning_rate / (1 - optimizer.momentum)
    return steps * training.epochs * training.learning_rate * model.curvature


@dataclass(frozen=True)
class LinearOutlook:
    """The outlook for a linear model of a table with a fixed clip norm: what noise alone makes of
    an output.

    Attributes:
      model: the model.
      noise: `output_noise`.
      reach: `reach`.
    """

    model: LinearModel
    noise: float
    reach: float

    @property
    def loud(self) -> bool:
        """True if noise drives the model."""
        return self.noise > LOUD_LOGIT * self.model.scale

    @property
    def verdict(self) -> str:
        """The prediction, in words."""
        if self.loud:
            return (
                "noise will drive the model: take a smaller server.learning_rate, or leave it out"
            )
        if self.reach < LEAST_REACH:
            return "it learns little: these are too few clients or rounds for this epsilon"
        return "it can learn"

    def __str__(self) -> str:
        said = f"noise alone is expected to move {self.model.said(self.noise)}"
        if self.model.scale == 1:
            chances = (1 / (1 + math.exp(sign * self.noise)) for sign in (1, -1))
            said += " (a chance of 0.5 becomes {:.2g} or {:.2g})".format(*chances)
        return said


def linear_outlook(plan: Plan) -> LinearOutlook | None:
    """The outlook of a plan; None unless its model is linear, of a table with public ranges, and
    its server steps by SGD."""
    model = plan.linear
    optimizer = plan.optimizer
    if model is None or not isinstance(optimizer, ServerSGD):
        return None
    noise = output_noise(plan, model, optimizer)
    return LinearOutlook(model, noise, reach(plan, model, optimizer))
