"""Losses of one value an example, which is what per-example clipping differentiates.

A loss here takes outputs (n, ...) and targets (n, ...) to (n,). The value of an example depends on that example alone:
a mean over positions or labels divides by the example's own number of them, never by one of the batch. So clipping the
gradient of each value bounds what the example can change.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import cast

from torch import Tensor, nn
from torch.nn import functional

from discreet.privacy.rules.objective import Loss, cross_entropy

# torch.nn's losses by what they give with reduction="none": a value for each number of the outputs, which must then
# have the shape of the targets; one for each position; one for each example.
_BY_NUMBER = (
    *(nn.MSELoss, nn.L1Loss, nn.HuberLoss, nn.SmoothL1Loss, nn.BCELoss, nn.BCEWithLogitsLoss),
    *(nn.SoftMarginLoss, nn.PoissonNLLLoss, nn.KLDivLoss, nn.HingeEmbeddingLoss),
)
_BY_CLASS = (nn.CrossEntropyLoss, nn.NLLLoss)
_BY_EXAMPLE = (nn.MultiMarginLoss, nn.MultiLabelMarginLoss, nn.MultiLabelSoftMarginLoss)


def _numbers(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Both as (n, numbers) of the outputs' type: (n,) and (n, 1) are the same. Nothing is broadcast over examples."""
    count = len(outputs)
    left, right = outputs.reshape(count, -1), targets.reshape(len(targets), -1).to(outputs.dtype)
    if left.shape != right.shape:
        raise ValueError(
            f"the model gives outputs of shape {tuple(outputs.shape)}, the targets have {tuple(targets.shape)}: "
            "this loss needs as many outputs as targets an example"
        )
    return left, right


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    """The squared error, (n,), the mean over an example's targets: outputs and targets (n,) or (n, k).

    >>> import torch
    >>> squared(torch.tensor([[1.0], [3.0]]), torch.tensor([0.0, 1.0]))
    tensor([1., 4.])
    """
    left, right = _numbers(outputs, targets)
    return (left - right).square().mean(1)


def absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    """The absolute error, (n,), the mean over an example's targets."""
    left, right = _numbers(outputs, targets)
    return (left - right).abs().mean(1)


def huber(outputs: Tensor, targets: Tensor) -> Tensor:
    """Huber's loss with delta 1, (n,): squared/2 up to an error of 1, linear beyond; the mean over targets.

    >>> import torch
    >>> huber(torch.tensor([0.5, 3.0]), torch.tensor([0.0, 0.0]))
    tensor([0.1250, 2.5000])
    """
    return functional.huber_loss(*_numbers(outputs, targets), reduction="none").mean(1)


def binary_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of yes-or-no labels, (n,), the mean over an example's labels.

    outputs are logits (n,), (n, 1) or (n, labels), targets 0 or 1 (or between) in as many numbers: one for a binary
    task, several for a multi-label one.

    >>> import torch
    >>> binary_cross_entropy(torch.zeros(2, 3), torch.tensor([[0, 1, 1], [1, 0, 0]]))
    tensor([0.6931, 0.6931])
    """
    return functional.binary_cross_entropy_with_logits(*_numbers(outputs, targets), reduction="none").mean(1)


LOSSES: Mapping[str, Loss] = {
    "cross_entropy": cross_entropy,
    "binary_cross_entropy": binary_cross_entropy,
    "squared": squared,
    "absolute": absolute,
    "huber": huber,
}


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
        return lambda outputs, targets: _reduced(single(*_numbers(outputs, targets)), summed)
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
