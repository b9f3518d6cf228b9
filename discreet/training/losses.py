"""Losses with one value an example, as per-example clipping needs them, and the choice of a run's
loss.

A loss maps outputs (n, ...) and targets (n, ...) to (n,). The value of an example depends on that
example alone: a mean over positions or labels divides by the example's own number of them, never by
that of the batch. So clipping the gradient of each value bounds the influence of the example.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import cast

from torch import Tensor, nn

from discreet.data.examples import Task, TaskShape
from discreet.data.targets import CLASSES, LABELS, NUMBERS, SEQUENCES, SURVIVAL
from discreet.models.least_squares import NAME as LEAST_SQUARES
from discreet.per_example.objective import Loss, cross_entropy, is_plain, made_of
from discreet.queries.survival import hazard_loss
from discreet.settings.rules import ConfigError
from discreet.settings.training import TaskConfig

# torch.nn's losses by their result with reduction="none": a value for each number of the outputs,
# which must then have the shape of the targets; one for each position; one for each example.
_BY_NUMBER = (
    nn.MSELoss,
    nn.L1Loss,
    nn.HuberLoss,
    nn.SmoothL1Loss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.SoftMarginLoss,
    nn.PoissonNLLLoss,
    nn.KLDivLoss,
    nn.HingeEmbeddingLoss,
)
_BY_CLASS = (nn.CrossEntropyLoss, nn.NLLLoss)
_BY_EXAMPLE = (nn.MultiMarginLoss, nn.MultiLabelMarginLoss, nn.MultiLabelSoftMarginLoss)


def per_example_loss(criterion: nn.Module) -> Loss:
    """A loss of torch.nn with two arguments, as one value an example. Raises ValueError for a loss
    of another kind.

    An example's value is the sum (reduction "sum" or "batchmean") or the mean (otherwise) over its
    own positions and labels. Class losses take outputs as PyTorch does, (n, classes) or (n,
    classes, positions...). Positions whose target is `ignore_index` do not count: the mean divides
    by the number of the example's other positions, and an example without others has the value 0. A
    class weight multiplies the value. Unlike in `nn.CrossEntropyLoss`, whose mean divides by the
    weights of the whole batch, nothing is divided by the weights.

    >>> import torch
    >>> loss = per_example_loss(nn.CrossEntropyLoss(ignore_index=0))
    >>> loss(torch.zeros(2, 5, 3), torch.tensor([[1, 2, 0], [0, 0, 0]]))
    tensor([1.6094, 0.0000])
    """
    kind = type(criterion)
    if kind not in (*_BY_NUMBER, *_BY_CLASS, *_BY_EXAMPLE):
        raise ValueError(
            f"loss: {kind.__name__} is not a loss of one value an example: give a function from "
            "outputs (n, ...) and targets (n, ...) to a tensor (n,), in which an example's value "
            "depends on that example alone"
        )
    if not is_plain(criterion):
        raise ValueError(
            f"loss: {kind.__name__} has a hook or a forward of its own, which may mix examples: "
            "write it as a function of outputs (n, ...) and targets (n, ...)"
        )
    weights = (getattr(criterion, name, None) for name in ("weight", "pos_weight"))
    if any(isinstance(value, Tensor) and value.dim() > 1 for value in weights):
        raise ValueError("loss: a weight must be one number for each class or label, not each row")
    single = copy.copy(criterion)
    summed = criterion.reduction in ("sum", "batchmean")
    single.__dict__["reduction"] = "none"

    def values_of(outputs: Tensor, targets: Tensor) -> Tensor:
        if kind in _BY_NUMBER:
            outputs, targets = _numbers_of(outputs, targets)
        values: Tensor = single(outputs, targets)
        if values.dim() == 1:
            return values
        values = values.flatten(1)
        if summed:
            return values.sum(1)
        # Floating-point targets are probabilities, which have no padding.
        if kind in _BY_NUMBER or targets.is_floating_point():
            return values.mean(1)
        counted = targets.ne(cast(int, single.ignore_index)).flatten(1).sum(1)
        return values.sum(1) / counted.clamp(min=1)

    return made_of(single, values_of)


def _numbers_of(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and targets as (n, numbers) of the outputs' type. (n,) and (n, 1) are the same;
    nothing is broadcast over examples."""
    left = outputs.reshape(len(outputs), -1)
    right = targets.reshape(len(targets), -1).to(outputs.dtype)
    if left.shape != right.shape:
        raise ValueError(
            f"the model gives outputs of shape {tuple(outputs.shape)}, the targets have "
            f"{tuple(targets.shape)}: this loss needs as many outputs as targets an example"
        )
    return left, right


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
    return hazard_loss(*_numbers_of(outputs, targets))


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
        raise ConfigError(
            f"task.loss must be {named} for {name}, whose targets are {kind} (got {asked.loss})"
        )
    if weights is not None and len(weights) != num_classes:
        if num_classes:
            has = f"{num_classes} classes"
        else:
            has = f"{kind} and no classes"
        raise ConfigError(
            f"task.class_weights must be one number a class: {name} has {has} (got {len(weights)})"
        )
