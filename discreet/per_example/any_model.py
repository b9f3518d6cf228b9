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

from discreet.per_example.objective import LOSS_SCALE, Objective
from discreet.per_example.terms import Rows, Term

_log = logging.getLogger("discreet")
_told: WeakSet[nn.Module] = WeakSet()  # models that the log has named


def built_terms(objective: Objective, inputs: Tensor, targets: Tensor) -> list[Term]:
    """Builds every gradient, n * num_params floats: by torch.func, or by a loop if that can't follow the model."""
    try:
        found, way = _mapped(objective, inputs, targets), "torch.func"
    except RuntimeError:  # control flow that depends on the data, say; what is wrong for one example is raised again
        found, way = _looped(objective, inputs, targets), "a loop over examples"
    if objective.model not in _told:
        _told.add(objective.model)
        _log.warning("no rule knows every layer of %s: gradients by %s, slower", type(objective.model).__name__, way)
    return found


def _mapped(objective: Objective, inputs: Tensor, targets: Tensor) -> list[Term]:
    trainable, places = objective.trainable(), _places(objective.model)

    def single(values: list[Tensor], example: Tensor, target: Tensor) -> Tensor:
        put = {name: value for old, value in zip(trainable, values, strict=True) for name in places[id(old)]}
        outputs = functional_call(objective.model, put, (example.unsqueeze(0),), tie_weights=False)
        return LOSS_SCALE * objective.losses(outputs, target.unsqueeze(0)).sum()

    with torch.enable_grad(), warnings.catch_warnings():
        # Of PyTorch on itself: attention has no batching rule in vmap, and is slower for it.
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        mapped = vmap(grad(single), in_dims=(None, 0, 0), randomness="different")
        found = mapped([value.detach() for value in trainable], inputs, targets)
    return [Rows(slot, rows.detach()) for slot, rows in zip(objective.slots.values(), found, strict=True)]


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
    """One by one. Each example has a seed of its own, so that what one draws changes nothing for the next."""
    device, draws = inputs.device, torch.Generator().set_state(torch.get_rng_state())
    seeds, found, drawn = torch.randint(2**62, (len(inputs),), generator=draws).tolist(), [], False
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=device.type):
        for seed, example, target in zip(seeds, torch.split(inputs, 1), torch.split(targets, 1), strict=True):
            torch.manual_seed(seed)
            before = torch.get_rng_state()
            found.append(plain_gradient(objective, example, target))
            drawn = drawn or not torch.equal(before, torch.get_rng_state())
    if drawn:
        torch.set_rng_state(draws.get_state())
    columns = zip(objective.slots.values(), zip(*found, strict=True), strict=True)
    return [Rows(slot, torch.stack(values)) for slot, values in columns]


def plain_gradient(objective: Objective, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    """The gradient of LOSS_SCALE times the summed loss by plain autograd, zero for parameters that are not used."""
    parameters = objective.trainable()
    with torch.enable_grad():
        losses = objective.losses(objective.model(inputs), targets)
    if not losses.requires_grad:
        return [torch.zeros_like(value) for value in parameters]
    scale = torch.full_like(losses, LOSS_SCALE)
    found = torch.autograd.grad(losses, parameters, scale, allow_unused=True, materialize_grads=True)
    return [value.to_dense() for value in found]
