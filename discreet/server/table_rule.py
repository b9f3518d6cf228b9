"""The rule for the clip norm and the step of a linear model of a table, from public facts alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from discreet.data.columns import CATEGORY, TEXT, Column
from discreet.data.description import DataDescription
from discreet.data.examples import Task
from discreet.data.targets import CLASSES
from discreet.models.least_squares import weight_of_products
from discreet.planning.linear_model import LinearModel
from discreet.planning.linear_outlook import output_noise
from discreet.planning.plan import Plan
from discreet.planning.server_optimizer import ServerSGD
from discreet.server.spread import FLAG, spread_of
from discreet.settings.adjacency import USER
from discreet.settings.rules import ConfigError
from discreet.settings.settings import Settings
from discreet.settings.training import LEAST_SQUARES

LINEAR = ("linear", "logistic_regression")
NORM = "privacy.user.clip.norm"
# The largest expected noise of a logit, over the root of the number of clients, and for any number.
# Chosen on three made-up and three real tables: docs/results/table_rule.csv.
BOUND = 0.06
LARGEST_BOUND = 0.9
# Up to here one round of least squares was as good in these tables.
FEW_COLUMNS = 64
FEW_CLIENTS = 5000
LONGEST = 2.0  # a step, however steady
STEADY = 1.5  # the longest step, over the inverse of the loss's largest curvature


def linear_model(settings: Settings, task: Task) -> LinearModel | None:
    """The public facts about a linear model of a table; None for another model, and for inputs
    without public ranges."""
    described = task.description
    if settings.model.name not in (*LINEAR, LEAST_SQUARES) or settings.data.normalise != "none":
        return None
    if described is None or not (described.columns or described.low is not None):
        return None
    width = task.shape.input_shape[0]
    norm = math.sqrt(1 + sum(_mean_squares(described, width)))
    products = weight_of_products(width) if settings.model.name == LEAST_SQUARES else None
    return LinearModel(norm, task.shape.target.kind, task.shape.num_outputs, products)


def _mean_squares(described: DataDescription, width: int) -> Iterator[float]:
    """The expected squares of inputs, from what is declared: a public range is taken as six
    standard deviations, steps between points as equally frequent, and a flag as -1 or 1."""
    if not described.columns:
        found = spread_of(described, width)
        for mean, deviation in zip(found.means or (), found.deviations or (), strict=True):
            yield 1.0 if mean else deviation**2
    places = {column.name: _mean_square(column) for column in described.columns}
    yield from places.values()
    for column in described.columns:
        # The mean of a squared cosine is a half.
        yield sum(0.5 / degree**2 for degree in column.degrees)
    for first, second in described.pairs:
        yield places[first] * places[second]


def _mean_square(column: Column) -> float:
    """Of a column's position, or of its one-hot vector."""
    if column.kind in (CATEGORY, TEXT) or column.bins or (column.low, column.high) == FLAG:
        return 1.0
    return 1 / 3 if column.points else 1 / 9


def with_clip_norm(settings: Settings, model: LinearModel | None) -> Settings:
    """The settings with the clip norm of the rule, unless one is given: a client's step with a
    residual of the expected size. ConfigError: the rule does not fit the model or the data."""
    clip = settings.privacy.user.clip
    training = settings.training
    if clip.norm is not None:
        return settings
    norm = 1.0
    if settings.privacy.user.enabled:
        if model is None or training.optimizer != "sgd":
            raise ConfigError(
                f"{NORM} must be given, for instance 0.5: null is for a linear model of a table "
                "with public ranges, trained by sgd, and data.normalise=none"
            )
        norm = training.epochs * training.learning_rate * model.gradient_norm
    user = replace(settings.privacy.user, clip=replace(clip, norm=norm))
    return replace(settings, privacy=replace(settings.privacy, user=user))


def with_step(plan: Plan) -> Plan:
    """The plan with the server's learning rate of the rule, if the run's own settings have neither
    a clip norm nor a learning rate: at most 2, not so long that it swings, and shortened until the
    expected noise of an output is within its bound."""
    server = plan.settings.server
    model = plan.linear
    optimizer = plan.optimizer
    if not plan.by_rule or model is None:
        return plan
    clients = USER in plan.mechanisms
    reasons = [*_of_clip_norm(plan, model)] if clients else []
    if server.learning_rate is not None or not isinstance(optimizer, ServerSGD):
        return replace(plan, reasons=tuple(reasons))
    training = plan.run.training
    local = training.epochs * training.learning_rate
    rate = min(LONGEST, STEADY / (local * model.curvature * model.row_norm**2))
    why = "the longest step that does not swing"
    bound = noise_bound(model, plan.run.user.population_size)
    noise = output_noise(plan, model, replace(optimizer, learning_rate=rate)) if clients else 0.0
    if noise > bound:
        rate *= bound / noise
        why = (
            f"shortened until noise moves {model.said(bound)}, for "
            f"{plan.run.user.population_size} clients"
        )
    reasons += [f"server.learning_rate={rate:.3g}: {why}", *_once(plan, model)]
    plan = plan.changed(server=replace(server, learning_rate=rate))
    return replace(plan, reasons=tuple(reasons))


def _of_clip_norm(plan: Plan, model: LinearModel) -> Iterator[str]:
    """The reason for the clip norm."""
    yield (
        f"{NORM}={plan.clip.first:.3g}: the learning rate times the expected norm of an encoded "
        f"row, {model.row_norm:.3g}, from what data.toml declares"
    )


def _once(plan: Plan, model: LinearModel) -> Iterator[str]:
    """The advice to ask everybody once, where that was as good: for few columns and clients."""
    width = plan.num_params // model.outputs
    few = width <= FEW_COLUMNS and plan.run.user.population_size <= FEW_CLIENTS
    if few and model.kind == CLASSES and plan.run.user.sampling == "poisson":
        numbers = width * (width + 1) // 2 + model.outputs * width
        yield (
            "experiment=table_once is often about as accurate with so few columns and clients, "
            f"with a larger loss: it asks each client once, for {numbers} numbers"
        )


def noise_bound(model: LinearModel, clients: int) -> float:
    """The largest expected noise of an output: more where many clients average it out later."""
    return model.scale * min(LARGEST_BOUND, BOUND * math.sqrt(clients))
