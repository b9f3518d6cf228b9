"""The losses that a configuration can name, each of one value an example: see `discreet/training/losses.py`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional

from discreet.privacy.rules.objective import Loss, cross_entropy


def numbers_of(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
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
    left, right = numbers_of(outputs, targets)
    return (left - right).square().mean(1)


def absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    """The absolute error, (n,), the mean over an example's targets."""
    left, right = numbers_of(outputs, targets)
    return (left - right).abs().mean(1)


def huber(outputs: Tensor, targets: Tensor, *, delta: float = 1.0) -> Tensor:
    """Huber's loss, (n,): squared/2 up to an error of `delta`, linear beyond; the mean over targets.

    >>> import torch
    >>> huber(torch.tensor([0.5, 3.0]), torch.tensor([0.0, 0.0]))
    tensor([0.1250, 2.5000])
    """
    return functional.huber_loss(*numbers_of(outputs, targets), reduction="none", delta=delta).mean(1)


def binary_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of yes-or-no labels, (n,), the mean over an example's labels.

    outputs are logits (n,), (n, 1) or (n, labels), targets 0 or 1 (or between) in as many numbers: one for a binary
    task, several for a multi-label one.

    >>> import torch
    >>> binary_cross_entropy(torch.zeros(2, 3), torch.tensor([[0, 1, 1], [1, 0, 0]]))
    tensor([0.6931, 0.6931])
    """
    return functional.binary_cross_entropy_with_logits(*numbers_of(outputs, targets), reduction="none").mean(1)


LOSSES: Mapping[str, Loss] = {
    "cross_entropy": cross_entropy,
    "binary_cross_entropy": binary_cross_entropy,
    "squared": squared,
    "absolute": absolute,
    "huber": huber,
}
