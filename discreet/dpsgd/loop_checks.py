"""Checks of the parts of a training loop: its model, its loss and its optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_not

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.optim import LBFGS, Optimizer, SparseAdam

from discreet.dpsgd.loop_optimizers import STEPS
from discreet.dpsgd.loop_plan import LoopPlan, LoopPrivacy, check_number
from discreet.per_example.objective import PADDING, Loss, trainable


def one_value_an_example(loss: Loss, model: nn.Module) -> tuple[Loss, bool]:
    """A loss with one value an example, and True if it is the plain cross-entropy for class
    numbers."""
    if not callable(loss):
        raise ValueError(
            "loss must be a function of outputs and targets with one value an example, such as "
            f'torch.nn.CrossEntropyLoss(reduction="none"), not {loss!r}'
        )
    reduction = getattr(loss, "reduction", "none")
    if reduction != "none":
        raise ValueError(
            f"loss: reduction={reduction!r} gives one value for a whole batch: give it "
            f'reduction="none"'
        )
    if not isinstance(loss, nn.Module):
        return loss, False
    from discreet.per_example.criteria import check_trains_nothing, per_example_loss

    check_trains_nothing(loss, model)
    if not type(loss).__module__.startswith("torch.nn."):
        return loss, False
    is_plain = (
        type(loss) is nn.CrossEntropyLoss and loss.weight is None and loss.label_smoothing == 0
    )
    return per_example_loss(loss), bool(is_plain and loss.ignore_index == PADDING)


def check_classes(targets: Tensor) -> None:
    """Raises ValueError for cross-entropy targets that are single numbers of a type other than
    int64."""
    if targets.dim() == 1 and targets.dtype != torch.int64:
        wanted = "class numbers as torch.int64 (targets.long()), or another loss"
        raise ValueError(f"targets: cross-entropy needs {wanted}, not {targets.dtype}")


def check_kinds(model: object, dataset: object, privacy: object, owners: object) -> None:
    """Raises ValueError unless the model is a module, `privacy` a LoopPrivacy, which says something
    of owners only if there are some, and the data set more than the tensors for one."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(privacy, LoopPrivacy):
        raise ValueError(
            "privacy must be a LoopPrivacy, such as LoopPrivacy(noise_multiplier=1.0), not "
            f"{type(privacy).__name__}"
        )
    if isinstance(dataset, tuple) and all(isinstance(part, Tensor) for part in dataset):
        raise ValueError("dataset: give torch.utils.data.TensorDataset(inputs, targets), no tuple")
    if owners is None and privacy.rows_per_owner is not None:
        raise ValueError(
            "rows_per_owner needs owners=, the owner of each row: without it each row is protected "
            "alone"
        )


def check_loop_model(model: nn.Module) -> None:
    if isinstance(model, DistributedDataParallel):
        raise ValueError(
            "model: give the module inside DistributedDataParallel, and "
            "LoopPrivacy(distributed=True)"
        )
    if any(isinstance(value, UninitializedParameter) for value in model.parameters()):
        raise ValueError(
            "model: a lazy layer has no parameters before its first pass: call the model once on "
            "an input"
        )
    if not trainable(model):
        raise ValueError("model: no parameter is trainable (requires_grad)")


def check_price(plan: LoopPlan, privacy: LoopPrivacy, delta: float, target: float | None) -> None:
    n = plan.num_examples
    noise = privacy.noise_multiplier
    check_number("delta", delta)
    if target is not None:
        check_number("target_epsilon", target)
    if not 0 < delta < 1 / n:
        raise ValueError(f"delta must be above 0 and below 1 / {n}, for {n} examples, not {delta}")
    if (noise is None) if target is None else isinstance(noise, int | float):
        raise ValueError("give either target_epsilon or privacy=LoopPrivacy(noise_multiplier=...)")


def optimizers_of(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    if isinstance(optimizer, Optimizer | type) or not isinstance(optimizer, Iterable):
        listed = [optimizer]
    else:
        listed = list(optimizer)
    for each in listed:
        if not isinstance(each, Optimizer):
            if isinstance(each, type):
                name = f"the class {each.__name__}"
            else:
                name = type(each).__name__
            raise ValueError(
                "optimizer must be an optimizer of the model, such as "
                f"torch.optim.SGD(model.parameters(), lr=0.1), not {name}"
            )
    return [_without_accelerate(each) for each in listed]


def _without_accelerate(optimizer: Optimizer) -> Optimizer:
    """The optimizer in the wrapper of accelerate's `prepare`, which would divide the noised mean by
    the scale of a loss, and leave out the steps between which it accumulates gradients."""
    if type(optimizer).__name__ != "AcceleratedOptimizer":
        return optimizer
    inner: Optimizer = vars(optimizer)["optimizer"]
    return inner


def check_known(optimizers: Sequence[Optimizer], taken: int) -> None:
    """Raises ValueError if an optimizer has taken steps that a loop without a ledger, with `taken`
    steps, does not know."""
    if any(
        (optimizer.state and not taken)
        or any(group.get(STEPS, 0) > taken for group in optimizer.param_groups)
        for optimizer in optimizers
    ):
        raise ValueError(
            "optimizer: it has taken steps that this DPSGD does not know, and epsilon() would "
            "leave them out. To resume a loop, load its DPSGD.state_dict(); to add loops up "
            "give LoopPrivacy(ledger=...); otherwise begin with a new optimizer"
        )


def check_optimizers(optimizers: Sequence[Optimizer], parameters: Sequence[nn.Parameter]) -> None:
    """Raises ValueError unless each trainable parameter of a model is in exactly one optimizer, and
    no other parameter is."""
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS | SparseAdam):
            name = type(optimizer).__name__
            raise ValueError(
                f"optimizer: {name} is not served: it needs a closure or sparse gradients"
            )
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    listed = [id(value) for group in groups for value in group["params"]]
    held = set(listed)
    if len(held) < len(listed):
        raise ValueError(
            "optimizer: two of them hold the same parameter, which would take two steps"
        )
    if held - {id(value) for value in parameters}:
        raise ValueError(
            "optimizer: it holds parameters that are not the model's, which nothing would make "
            "private"
        )
    if optimizers and {id(value) for value in parameters if value.requires_grad} - held:
        raise ValueError(
            "optimizer: it does not hold all trainable parameters: freeze others by "
            "requires_grad_(False)"
        )


def check_same(before: Sequence[nn.Parameter], parameters: Sequence[nn.Parameter]) -> None:
    """Raises ValueError unless the pieces of a batch have the same trainable parameters."""
    if len(before) != len(parameters) or any(map(is_not, before, parameters)):
        raise ValueError("model: parameters were frozen or released between pieces of one batch")
