"""Three ways to per-example gradients: one pass with ghost norms, torch.func, and a loop over examples.

Each gives terms for a batch (n >= 1 examples). All gradients are those of LOSS_SCALE times the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from discreet.privacy.ghost.arithmetic import ARITHMETIC_RULES
from discreet.privacy.ghost.convolution import CONVOLUTION_RULES
from discreet.privacy.ghost.layers import LAYER_RULES
from discreet.privacy.ghost.merge import merge
from discreet.privacy.ghost.recorder import Recorder, Records, Use
from discreet.privacy.ghost.recurrent import RECURRENT_RULES
from discreet.privacy.ghost.stack import plain_layers, stacked_backward, stacked_forward
from discreet.privacy.ghost.terms import Entry, Parts, Rows, Slot, Term

Loss = Callable[[Tensor, Tensor], Tensor]

# A power of two, so exact. It keeps the squares of small gradients above the smallest float: without it inputs of
# 1e18 with output gradients of 1e-24 would have a norm of 0 by the product rule, and pass unclipped.
LOSS_SCALE = 2.0**20
_LOSS_SCALE = torch.tensor(LOSS_SCALE)  # a tensor is multiplied by a tensor in half the time

_RULES = {**LAYER_RULES, **CONVOLUTION_RULES, **RECURRENT_RULES, **ARITHMETIC_RULES}


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of each example, (n,).

    outputs are logits (n, ..., classes), targets class numbers (n, ...). Where an example has several positions (a
    sequence) its loss is their mean.

    >>> cross_entropy(torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.long))
    tensor([1.6094, 1.6094])
    """
    if outputs.dim() == 2:
        return functional.cross_entropy(outputs, targets, reduction="none")
    losses = functional.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none")
    return losses.view(len(outputs), -1).mean(1)


@dataclass(frozen=True, slots=True)
class Layout:
    """The parameters of a model in order, and the slots of the trainable ones by identity."""

    parameters: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    shapes: tuple[torch.Size, ...]
    slots: Mapping[int, Slot]

    def zeros(self) -> Tensor:
        """A flat vector for a sum over examples, (num_params,)."""
        return self.parameters[0].new_zeros(sum(self.sizes), requires_grad=False)

    def unwritten(self) -> Tensor:
        """Memory for a sum over examples, (num_params,), that holds anything."""
        return self.parameters[0].new_empty(sum(self.sizes), requires_grad=False)

    def parts(self, total: Tensor, *, fresh: bool = False) -> Parts:
        """The parts of a flat vector, which is `fresh` where it is `unwritten`."""
        pieces = zip(torch.split_with_sizes(total, self.sizes), self.shapes, strict=True)
        return Parts([piece if len(shape) == 1 else piece.view(shape) for piece, shape in pieces], fresh=fresh)

    def trainable(self) -> list[Tensor]:
        """The parameters that have slots, in the slots' order."""
        return [value for value in self.parameters if id(value) in self.slots]


@dataclass(frozen=True, slots=True)
class Objective:
    """What is differentiated: the loss of a model by its parameters, for norms of one order."""

    model: nn.Module
    layout: Layout
    loss: Loss
    order: int

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each example; a ValueError where the loss gives anything but (n,)."""
        losses = self.loss(outputs, targets)
        if losses.shape != (len(targets),):
            raise ValueError(f"loss must give one value an example, ({len(targets)},), not {tuple(losses.shape)}")
        return losses


Method = Callable[[Objective, Tensor, Tensor], list[Term]]


def one_pass(objective: Objective, inputs: Tensor, targets: Tensor) -> list[Term]:
    """One forward pass and one backward pass to the layers' outputs, without parameter gradients."""
    entries = None
    if _has_known_gradient(objective.loss, targets):
        entries = _stacked(objective, inputs, targets)
    return merge(_recorded(objective, inputs, targets) if entries is None else entries, objective.order)


def _stacked(objective: Objective, inputs: Tensor, targets: Tensor) -> list[Entry] | None:
    layers = plain_layers(objective.model)
    values = stacked_forward(layers, inputs) if layers else []
    if not values or values[-1].dim() != 2:
        return None
    return stacked_backward(layers, values, _logit_gradients(values[-1], targets), slots=objective.layout.slots)


def _recorded(objective: Objective, inputs: Tensor, targets: Tensor) -> list[Entry]:
    records = Records(objective.layout.slots, inputs.shape[0])
    with torch.enable_grad(), Recorder(records, _RULES):
        outputs = objective.model(inputs)
    if not records.uses:
        return []
    grads = _output_gradients(objective, outputs, targets, records.uses)
    pairs = zip(records.uses, grads, strict=True)
    return [entry for use, found in pairs if found is not None for entry in use.read(found)]


def _output_gradients(
    objective: Objective, outputs: Tensor, targets: Tensor, uses: Sequence[Use]
) -> Sequence[Tensor | None]:
    """The gradient of LOSS_SCALE times the loss at each use's outputs."""
    edges = [use.edge for use in uses]
    if _has_known_gradient(objective.loss, targets) and outputs.dim() == 2:
        return torch.autograd.grad(outputs, edges, _logit_gradients(outputs, targets), allow_unused=True)
    with torch.enable_grad():
        losses = objective.losses(outputs, targets)
    return torch.autograd.grad(losses, edges, torch.full_like(losses, LOSS_SCALE), allow_unused=True)


def _has_known_gradient(loss: Loss, targets: Tensor) -> bool:
    return loss is cross_entropy and targets.dim() == 1 and targets.dtype == torch.int64


def _logit_gradients(logits: Tensor, targets: Tensor) -> Tensor:
    """The gradient of LOSS_SCALE times the cross-entropy at logits (n, classes): softmax minus one-hot targets."""
    if logits.shape[0] != targets.shape[0]:
        raise ValueError(f"the model must give one row of logits an example, {targets.shape[0]}, not {logits.shape[0]}")
    return logits.softmax(1).scatter_(1, targets.unsqueeze(1), -1.0, reduce="add").mul_(_LOSS_SCALE)


def vmapped(objective: Objective, inputs: Tensor, targets: Tensor) -> list[Term]:
    """Every gradient built, by torch.func.vmap over torch.func.grad: n * num_params floats."""
    slots = objective.layout.slots
    names = {name: slots[id(value)] for name, value in objective.model.named_parameters() if id(value) in slots}
    values = {name: value.detach() for name, value in objective.model.named_parameters() if name in names}

    def single(values: dict[str, Tensor], example: Tensor, target: Tensor) -> Tensor:
        outputs = functional_call(objective.model, values, (example.unsqueeze(0),))
        return LOSS_SCALE * objective.losses(outputs, target.unsqueeze(0)).sum()

    with torch.enable_grad():
        found = vmap(grad(single), in_dims=(None, 0, 0))(values, inputs, targets)
    return [Rows(slot, found[name].detach()) for name, slot in names.items()]


def looped(objective: Objective, inputs: Tensor, targets: Tensor) -> list[Term]:
    """One backward pass for each example: slow, and right for whatever autograd can differentiate."""
    pairs = zip(torch.split(inputs, 1), torch.split(targets, 1), strict=True)
    found = [_single_gradient(objective, example, target) for example, target in pairs]
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
