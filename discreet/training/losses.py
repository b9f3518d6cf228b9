"""Losses of one value an example, which is what per-example clipping differentiates.

A loss here takes outputs (n, ...) and targets (n, ...) to (n,). The value of an example depends on that example alone:
a mean over positions or labels divides by the example's own number of them, never by one of the batch. So clipping the
gradient of each value bounds what the example can change.
"""

from __future__ import annotations

import copy
from typing import cast

from torch import Tensor, nn

from discreet.privacy.rules.objective import Loss
from discreet.training.named_losses import LOSSES, absolute, binary_cross_entropy, huber, numbers_of, squared

__all__ = ["LOSSES", "absolute", "binary_cross_entropy", "huber", "per_example_loss", "squared"]

# torch.nn's losses by what they give with reduction="none": a value for each number of the outputs, which must then
# have the shape of the targets; one for each position; one for each example.
_BY_NUMBER = (
    *(nn.MSELoss, nn.L1Loss, nn.HuberLoss, nn.SmoothL1Loss, nn.BCELoss, nn.BCEWithLogitsLoss),
    *(nn.SoftMarginLoss, nn.PoissonNLLLoss, nn.KLDivLoss, nn.HingeEmbeddingLoss),
)
_BY_CLASS = (nn.CrossEntropyLoss, nn.NLLLoss)
_BY_EXAMPLE = (nn.MultiMarginLoss, nn.MultiLabelMarginLoss, nn.MultiLabelSoftMarginLoss)


def per_example_loss(criterion: nn.Module) -> Loss:
    """A loss of torch.nn with two arguments, as one value an example.

    An example's value is the sum (reduction "sum" or "batchmean") or the mean (else) over its own positions and labels.
    Class losses take outputs as PyTorch does, (n, classes) or (n, classes, positions...). Positions whose target is
    `ignore_index` do not count: the mean divides by the example's others, and an example that has none has the value 0.
    A class weight multiplies the value; unlike `nn.CrossEntropyLoss`, whose mean divides by the weights of the whole
    batch, nothing divides it out again.

    Raises:
      ValueError: another kind of loss. A loss of one's own is a function from outputs and targets to (n,).

    >>> import torch
    >>> loss = per_example_loss(nn.CrossEntropyLoss(ignore_index=0))
    >>> loss(torch.zeros(2, 5, 3), torch.tensor([[1, 2, 0], [0, 0, 0]]))
    tensor([1.6094, 0.0000])
    """
    kind = type(criterion)
    if kind not in (*_BY_NUMBER, *_BY_CLASS, *_BY_EXAMPLE):
        raise ValueError(
            f"loss: {kind.__name__} is not a loss of one value an example: give a function from outputs (n, ...) and "
            "targets (n, ...) to a tensor (n,), in which an example's value depends on that example alone"
        )
    single, summed = copy.copy(criterion), criterion.reduction in ("sum", "batchmean")
    single.__dict__["reduction"] = "none"
    if kind in _BY_NUMBER:
        return lambda outputs, targets: _reduced(single(*numbers_of(outputs, targets)), summed)
    if kind in _BY_EXAMPLE:
        return lambda outputs, targets: single(outputs, targets)
    return lambda outputs, targets: _class_values(single, outputs, targets, summed=summed)


def _reduced(values: Tensor, summed: bool) -> Tensor:
    return values.sum(1) if summed else values.mean(1)


def _class_values(criterion: nn.Module, outputs: Tensor, targets: Tensor, *, summed: bool) -> Tensor:
    values: Tensor = criterion(outputs, targets)
    if values.dim() == 1:
        return values
    values = values.flatten(1)
    if summed or targets.is_floating_point():  # probabilities for targets: no position is padding
        return _reduced(values, summed)
    counted = targets.ne(cast(int, criterion.ignore_index)).flatten(1).sum(1)
    return values.sum(1) / counted.clamp(min=1)
