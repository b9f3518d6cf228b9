"""The loss that a run learns by: by what is predicted, and by the settings of `task`."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from discreet.client_settings import TaskConfig
from discreet.privacy.rules.objective import Loss, cross_entropy
from discreet.training.named_losses import LOSSES, huber


def loss_of(task: TaskConfig) -> Loss:
    """The loss that `task.loss` names, cross entropy if it names none: one value an example, (n,)."""
    name = task.loss or "cross_entropy"
    if name == "cross_entropy" and task.class_weights is not None:
        return partial(weighted_cross_entropy, weights=tuple(task.class_weights))
    return partial(huber, delta=task.huber_delta) if name == "huber" else LOSSES[name]


def weighted_cross_entropy(outputs: Tensor, targets: Tensor, *, weights: tuple[float, ...]) -> Tensor:
    """Each example's cross entropy times the weight of its class, (n,); of a sequence, the mean of that over its
    positions. Nothing divides by the weights of a batch, as torch.nn.CrossEntropyLoss does: an example's gradient would
    then depend on others.

    >>> import torch
    >>> weighted_cross_entropy(torch.zeros(2, 2), torch.tensor([0, 1]), weights=(1.0, 3.0))
    tensor([0.6931, 2.0794])
    """
    return cross_entropy(outputs, targets, outputs.new_tensor(weights))
