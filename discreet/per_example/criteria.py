"""The losses of torch.nn as losses with one value an example, for per-example clipping."""

from __future__ import annotations

import copy
from typing import cast

from torch import Tensor, nn

from discreet.per_example.objective import Loss, is_plain, made_of

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


def check_trains_nothing(loss: nn.Module, model: nn.Module) -> None:
    """Raises ValueError for a loss with trainable parameters that are not the model's."""
    own = {*map(id, model.parameters())}
    if any(value.requires_grad and id(value) not in own for value in loss.parameters()):
        raise ValueError(
            "loss: it has trainable parameters, which no step would change: move them into the "
            "model, or freeze them (requires_grad_(False))"
        )


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
            outputs, targets = numbers_of(outputs, targets)
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


def numbers_of(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
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
