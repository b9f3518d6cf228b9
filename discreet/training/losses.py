"""Losses with one value an example, as per-example clipping needs them, and the choice of a run's
loss.

A loss maps outputs (n, ...) and targets (n, ...) to (n,). The value of an example depends on that
example alone: a mean over positions or labels divides by the example's own number of them, never by
that of the batch. So clipping the gradient of each value bounds the influence of the example.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor, nn

from discreet.data.examples import Task, TaskShape
from discreet.data.targets import CLASSES, LABELS, NUMBERS, SEQUENCES, SURVIVAL
from discreet.per_example.criteria import numbers_of, per_example_loss
from discreet.per_example.objective import Loss, cross_entropy
from discreet.settings.rules import ConfigError
from discreet.settings.training import LEAST_SQUARES, TaskConfig


def weighted_cross_entropy(
    outputs: Tensor, targets: Tensor, *, weights: tuple[float, ...]
) -> Tensor:
    """`cross_entropy` times the weight of each example's class, without division by a batch's
    weights."""
    return cross_entropy(outputs, targets, outputs.new_tensor(weights))


def least_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """The output of the target's class, negative: see `discreet.models.least_squares`."""
    return -outputs.gather(1, targets[:, None])[:, 0]


def hazards(outputs: Tensor, targets: Tensor) -> Tensor:
    """`hazard_loss`, after a check of the shapes."""
    from discreet.queries.survival import hazard_loss

    return hazard_loss(*numbers_of(outputs, targets))


LOSSES: Mapping[str, Loss] = {
    "cross_entropy": cross_entropy,
    LEAST_SQUARES: least_squares,
    "binary_cross_entropy": per_example_loss(nn.BCEWithLogitsLoss()),
    "squared": per_example_loss(nn.MSELoss()),
    "absolute": per_example_loss(nn.L1Loss()),
    "huber": per_example_loss(nn.HuberLoss()),
    "hazards": hazards,
}
# The losses for each kind of targets, the usual one first.
FITTING = {
    CLASSES: ("cross_entropy", LEAST_SQUARES),
    LABELS: ("binary_cross_entropy",),
    NUMBERS: ("squared", "absolute", "huber"),
    SEQUENCES: ("cross_entropy",),
    SURVIVAL: ("hazards",),
}


def loss_of(task: TaskConfig) -> Loss:
    """The loss named by `task.loss`, by default cross entropy: one value an example, (n,)."""
    name = task.loss or "cross_entropy"
    if name == "cross_entropy" and task.class_weights is not None:
        return partial(weighted_cross_entropy, weights=tuple(task.class_weights))
    if name == "huber":
        return per_example_loss(nn.HuberLoss(delta=task.huber_delta))
    return LOSSES[name]


def rating_loss_of(task: TaskConfig) -> Loss:
    """The loss by which models are rated: that of training, unless it only adds up sums."""
    if task.loss == LEAST_SQUARES:
        return cross_entropy
    return loss_of(task)


def resolved_task(asked: TaskConfig, task: Task) -> TaskConfig:
    """The settings with the name of the loss filled in. Raises ConfigError as `check_task` does."""
    check_task(asked, task.shape, task.name)
    return TaskConfig(
        asked.loss or FITTING[task.shape.target.kind][0], asked.class_weights, asked.huber_delta
    )


def check_task(asked: TaskConfig, shape: TaskShape, name: str) -> None:
    """Raises ConfigError if the loss or the class weights do not fit the targets of the data set
    `name`."""
    kind = shape.target.kind
    weights = asked.class_weights
    num_classes = shape.num_classes
    fitting = FITTING[kind]
    if asked.loss is not None and asked.loss not in fitting:
        named = " or ".join(fitting)
        once = "; experiment=table_once is for classes" if asked.loss == LEAST_SQUARES else ""
        raise ConfigError(
            f"task.loss must be {named} for {name}, whose targets are {kind} (got {asked.loss})"
            f"{once}"
        )
    if weights is not None and len(weights) != num_classes:
        if num_classes:
            has = f"{num_classes} classes"
        else:
            has = f"{kind} and no classes"
        raise ConfigError(
            f"task.class_weights must be one number a class: {name} has {has} (got {len(weights)})"
        )
