"""Per-example gradients of a model for which there are no rules: torch.func builds them, example by example.

Whatever the model does with a batch, each example goes through it alone here, and what is clipped is the very vector
that is summed. So no example can add more than the clip norm. A parameter that the loss or the model reaches in another
way than as an attribute of a module (an alias of a weight that was made beforehand, say) counts as a constant there.
"""

from __future__ import annotations

import logging
import warnings
from collections import defaultdict
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd

from discreet.privacy.rules.objective import LOSS_SCALE, Objective
from discreet.privacy.rules.terms import Rows, Term

_log = logging.getLogger("discreet")
_told: WeakSet[nn.Module] = WeakSet()  # models that the log has named


def built_terms(objective: Objective, inputs: Tensor, targets: Tensor) -> list[Term]:
    """Every gradient built, n * num_params floats: by torch.func, or one by one if torch.func can't follow the model.

    Raises:
      ValueError: a layer mixes examples, or the model or its loss draws random numbers.
    """
    _refuse_mixing(objective.model)
    try:
        found, way = _mapped(objective, inputs, targets), "torch.func"
    except RuntimeError:  # control flow that depends on the data, say; what is wrong for one example is raised again
        found, way = _looped(objective, inputs, targets), "a loop over examples"
    if objective.model not in _told:
        _told.add(objective.model)
        _log.warning("no rule knows every layer of %s: gradients by %s, slower", type(objective.model).__name__, way)
    return found


def _refuse_mixing(model: nn.Module) -> None:
    """ValueError for layers by which examples change each other's gradients, or by which chance enters."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, _BatchNorm) or (isinstance(module, _NormBase) and module.track_running_stats):
            raise ValueError(f"layer {name!r} ({kind}) mixes examples: use GroupNorm instead")
        if isinstance(module, _DropoutNd) and module.training and module.p > 0:
            raise ValueError(f"layer {name!r} ({kind}) draws random numbers: use eval mode, or set p to 0")


def _mapped(objective: Objective, inputs: Tensor, targets: Tensor) -> list[Term]:
    layout, places = objective.layout, _places(objective.model)
    trainable = layout.trainable()

    def single(values: list[Tensor], example: Tensor, target: Tensor) -> Tensor:
        put = {name: value for old, value in zip(trainable, values, strict=True) for name in places[id(old)]}
        outputs = functional_call(objective.model, put, (example.unsqueeze(0),), tie_weights=False)
        return LOSS_SCALE * objective.losses(outputs, target.unsqueeze(0)).sum()

    with torch.enable_grad(), warnings.catch_warnings():
        # Of PyTorch on itself: attention has no batching rule in vmap, and is slower for it.
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        found = vmap(grad(single), in_dims=(None, 0, 0))([value.detach() for value in trainable], inputs, targets)
    return [Rows(slot, rows.detach()) for slot, rows in zip(layout.slots.values(), found, strict=True)]


def _places(model: nn.Module) -> dict[int, list[str]]:
    """Every name of each parameter, by identity, one for each module that owns it.

    torch.func ties such names by itself, but then leaves a module that is used twice with a tensor of its own.
    """
    places = defaultdict[int, list[str]](list)
    for prefix, module in model.named_modules():
        for name, value in module.named_parameters(prefix, recurse=False, remove_duplicate=False):
            places[id(value)].append(name)
    return places


def _looped(objective: Objective, inputs: Tensor, targets: Tensor) -> list[Term]:
    before = torch.get_rng_state()
    pairs = zip(torch.split(inputs, 1), torch.split(targets, 1), strict=True)
    found = [_single_gradient(objective, example, target) for example, target in pairs]
    if not torch.equal(before, torch.get_rng_state()):
        torch.set_rng_state(before)
        raise ValueError("the model or its loss draws random numbers: put it in eval mode")
    columns = zip(objective.layout.slots.values(), zip(*found, strict=True), strict=True)
    return [Rows(slot, torch.stack(values)) for slot, values in columns]


def _single_gradient(objective: Objective, example: Tensor, target: Tensor) -> list[Tensor]:
    """Plain autograd for one example, (1, ...): a gradient for each trainable parameter, zero for unused ones."""
    parameters = objective.layout.trainable()
    with torch.enable_grad():
        losses = objective.losses(objective.model(example), target)
    if not losses.requires_grad:
        return [torch.zeros_like(value) for value in parameters]
    scale = torch.full_like(losses, LOSS_SCALE)
    found = torch.autograd.grad(losses, parameters, scale, allow_unused=True, materialize_grads=True)
    return [value.to_dense() for value in found]
