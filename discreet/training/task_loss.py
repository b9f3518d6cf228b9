"""The loss that a run learns by: by what is predicted, and by the settings of `task`."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from discreet.client_settings import ConfigError, TaskConfig
from discreet.privacy.rules.objective import Loss, cross_entropy
from discreet.tasks.examples import Task
from discreet.tasks.targets import CLASSES, LABELS, NUMBERS
from discreet.training.losses import LOSSES

# The losses for each kind of targets, the usual one first.
FITTING = {
    CLASSES: ("cross_entropy",),
    LABELS: ("binary_cross_entropy",),
    NUMBERS: ("squared", "absolute", "huber"),
}


def loss_of(task: TaskConfig) -> Loss:
    """The loss that `task.loss` names, cross entropy if it names none: one value an example, (n,)."""
    name = task.loss or "cross_entropy"
    if name == "cross_entropy" and task.class_weights is not None:
        return partial(weighted_cross_entropy, weights=tuple(task.class_weights))
    return partial(huber, delta=task.huber_delta) if name == "huber" else LOSSES[name]


def weighted_cross_entropy(outputs: Tensor, targets: Tensor, *, weights: tuple[float, ...]) -> Tensor:
    """Each example's cross entropy times the weight of its class, (n,). Nothing divides by the weights of a batch, as
    torch.nn.CrossEntropyLoss does: an example's gradient would then depend on others.

    >>> weighted_cross_entropy(torch.zeros(2, 2), torch.tensor([0, 1]), weights=(1.0, 3.0))
    tensor([0.6931, 2.0794])
    """
    return cross_entropy(outputs, targets) * outputs.new_tensor(weights)[targets]


def huber(outputs: Tensor, targets: Tensor, *, delta: float) -> Tensor:
    """Huber's loss of each example, (n,), the mean over its numbers (n, k): squared / 2 up to an error of `delta`."""
    return functional.huber_loss(outputs, targets, reduction="none", delta=delta).mean(1)


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
        has = f"{task.num_classes} classes" if kind == CLASSES else f"{kind} and no classes"
        raise ConfigError(f"task.class_weights must be one number a class: {task.name} has {has} (got {len(weights)})")
    return TaskConfig(asked.loss or fitting[0], weights, asked.huber_delta)


def chance_loss(settings: TaskConfig, task: Task) -> float:
    """The mean loss on the public test set of a model that gives 0 throughout: every class or label the same chance, or
    the middle of every range. log(classes) for cross entropy without weights."""
    outputs = torch.zeros(len(task.test), task.num_outputs, dtype=torch.float64)
    targets = task.test.targets
    return float(loss_of(settings)(outputs, targets if task.num_classes else targets.double()).mean())
