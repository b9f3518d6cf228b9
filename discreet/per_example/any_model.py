"""Per-example gradients of a model for which there are no rules: torch.func builds them, example by example.

Whatever the model does with a batch, each example goes through it alone here, and what is clipped is the very vector
that is summed. So no example can add more than the clip norm. A parameter that the loss or the model reaches in another
way than as an attribute of a module (an alias of a weight that was made beforehand, say) counts as a constant there.
"""

from __future__ import annotations

import logging
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from discreet.per_example.attributes import put_back
from discreet.per_example.branches import Split
from discreet.per_example.layouts import FEWEST, Unserved
from discreet.per_example.objective import LOSS_SCALE, Objective, Tree, batches_in, count_of, filled, given, rows_of
from discreet.per_example.terms import Rows, Term
from discreet.per_example.watch import Watch

_log = logging.getLogger("discreet")
_told: WeakSet[nn.Module] = WeakSet()  # models that the log has named


def built_terms(objective: Objective, inputs: Tree, targets: Tree, *, reason: str) -> list[Term]:
    """Builds every gradient, n * num_params floats: by torch.func, or by a loop if that can't follow the model.

    `reason`: why the faster way does not serve the model."""
    try:
        if not all(isinstance(each, Tensor) for each in batches_in((inputs, targets))):
            raise RuntimeError("graphs have different sizes")
        found, way = _mapped(objective, inputs, targets), "torch.func"
    except RuntimeError:  # control flow that depends on the data, say; what is wrong for one example is raised again
        found, way = _looped(objective, inputs, targets), "a loop over examples"
    if objective.model not in _told:
        _told.add(objective.model)
        _log.warning("gradients of %s are found by %s, slower: %s", type(objective.model).__name__, way, reason)
    return found


def _mapped(objective: Objective, inputs: Tree, targets: Tree) -> list[Term]:
    trainable, whole = objective.trainable(), _WithLoss(objective)
    places = _places(whole)

    def single(values: list[Tensor], example: Tree, target: Tree) -> Tensor:
        put = {name: value for old, value in zip(trainable, values, strict=True) for name in places[id(old)]}
        alone = tuple(rows_of(part, None) for part in (example, target))
        found: Tensor = functional_call(whole, put, alone, tie_weights=False)
        return LOSS_SCALE * found

    with put_back(objective.kept), torch.enable_grad(), warnings.catch_warnings():
        # Of PyTorch on itself: attention has no batching rule in vmap, and is slower for it.
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        mapped = vmap(grad(single), in_dims=(None, 0, 0), randomness="different")
        found = mapped([value.detach() for value in trainable], inputs, targets)
    return _rows(objective, found)


class _WithLoss(nn.Module):
    """A model and its loss: the loss may read parameters too, and what the forward leaves on modules."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.model, self.objective = objective.model, objective

    def forward(self, inputs: Tree, targets: Tree) -> Tensor:
        values = given(inputs)  # not under autocast: layers without a rule for it would be given two types
        args = () if isinstance(values, dict) else values if isinstance(values, tuple) else (values,)
        outputs = self.model(*args, **(values if isinstance(values, dict) else {}))
        return self.objective.losses(outputs, targets).sum()


def _places(model: nn.Module) -> dict[int, list[str]]:
    """Every name of each parameter, by identity, one for each module that owns it.

    torch.func ties such names by itself, but then leaves a module that is used twice with a tensor of its own.
    """
    places = defaultdict[int, list[str]](list)
    for prefix, module in model.named_modules():
        for name, value in module.named_parameters(prefix, recurse=False, remove_duplicate=False):
            places[id(value)].append(name)
    return places


def _looped(objective: Objective, inputs: Tree, targets: Tree) -> list[Term]:
    """One by one. Each example has a seed of its own, so that what one draws changes nothing for the next."""
    device, draws = objective.parameters[0].device, torch.Generator().set_state(torch.get_rng_state())
    seeds, found, drawn = torch.randint(2**62, (count_of(inputs),), generator=draws).tolist(), [], False
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=device.type):
        for place, seed in enumerate(seeds):
            torch.manual_seed(seed)
            before, one = torch.get_rng_state(), slice(place, place + 1)
            try:
                with put_back(objective.kept):
                    found.append(plain_gradient(objective, rows_of(inputs, one), rows_of(targets, one)))
            except RuntimeError as error:
                raise ValueError(f"the model can't be called with one example alone: {error}") from error
            drawn = drawn or not torch.equal(before, torch.get_rng_state())
    if drawn:
        torch.set_rng_state(draws.get_state())
    return _rows(objective, map(torch.stack, zip(*found, strict=True)))


def _rows(objective: Objective, found: Iterable[Tensor]) -> list[Term]:
    pairs = zip(objective.slots.values(), found, strict=True)
    return [Rows(slot, rows.detach().to(objective.dtype)) for slot, rows in pairs]


def plain_gradient(objective: Objective, inputs: Tree, targets: Tree) -> list[Tensor]:
    """The gradient of LOSS_SCALE times the summed loss by plain autograd, zero for parameters that are not used."""
    parameters = objective.trainable()
    with torch.enable_grad():
        losses = objective.losses(objective.outputs(inputs), targets)
    if not losses.requires_grad:
        return [torch.zeros_like(value) for value in parameters]
    scale = torch.full_like(losses, LOSS_SCALE)
    found = torch.autograd.grad(losses, parameters, scale, allow_unused=True, materialize_grads=True)
    return [value.to_dense() for value in found]


@torch.no_grad()
def rows_apart(forward: Callable[[Tensor], list[Tensor]], inputs: Tensor, modules: Sequence[nn.Module]) -> list[Tensor]:
    """What a forward of some modules gives, each tensor (n, ...), with row i from row i of inputs (n, ...) alone: that
    is watched, in groups of rows that take the same branches, or else each row goes alone.

    Raises:
      ValueError: the forward mixes examples, or changes its parameters or buffers.
    """
    count, rows = len(inputs), max(len(inputs), FEWEST)
    given = filled(inputs, rows)
    watch = Watch({}, rows, modules)
    watch.rows(given)
    try:
        with watch:
            found = forward(given)
        for value in found:
            watch.check(value)
        return [value[:count] for value in found]
    except Split as split:
        with suppress(Unserved):
            groups = split.groups(count)
            parts = [rows_apart(forward, inputs[places], modules) for places in groups]
            order = torch.cat(groups).argsort()
            return [torch.cat(part)[order] for part in zip(*parts, strict=True)]
    except Unserved:
        pass
    return [torch.cat(parts) for parts in zip(*map(forward, torch.split(inputs, 1)), strict=True)]
