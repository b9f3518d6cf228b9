"""Which losses fit what is predicted, looked at where the server runs, and what a model loses that says nothing."""

from __future__ import annotations

import math

import torch

from discreet.client_settings import ConfigError, TaskConfig
from discreet.tasks.examples import Task
from discreet.tasks.targets import CLASSES, LABELS, NUMBERS, SEQUENCES
from discreet.training.task_loss import loss_of

_BATCH = 1024
# The losses for each kind of targets, the usual one first.
FITTING = {
    CLASSES: ("cross_entropy",),
    LABELS: ("binary_cross_entropy",),
    NUMBERS: ("squared", "absolute", "huber"),
    SEQUENCES: ("cross_entropy",),
}


def resolved_task(asked: TaskConfig, task: Task) -> TaskConfig:
    """The settings with the loss by its name.

    Raises:
      ConfigError: the loss does not fit what is predicted, or the class weights do not fit the classes.
    """
    kind = task.target.kind
    fitting = FITTING[kind]
    if asked.loss is not None and asked.loss not in fitting:
        named = " or ".join(fitting)
        raise ConfigError(f"task.loss must be {named} for {task.name}, whose targets are {kind} (got {asked.loss})")
    weights = asked.class_weights
    if weights is not None and len(weights) != task.num_classes:
        has = f"{task.num_classes} classes" if task.num_classes else f"{kind} and no classes"
        raise ConfigError(f"task.class_weights must be one number a class: {task.name} has {has} (got {len(weights)})")
    return TaskConfig(asked.loss or fitting[0], weights, asked.huber_delta)


def chance_loss(settings: TaskConfig, task: Task) -> float:
    """The mean loss on the public test set of a model that gives 0 throughout: every class or label the same chance, or
    the middle of every range. log(classes) for cross entropy without weights; infinity if there is no test set."""
    if len(task.test) == 0:
        return math.inf
    loss, total = loss_of(settings), 0.0
    for targets in torch.split(task.test.targets, _BATCH):
        outputs = torch.zeros(len(targets), *task.output_shape, dtype=torch.float64)
        total += float(loss(outputs, targets if task.num_classes else targets.double()).sum())
    return total / len(task.test)
