"""One forward and one backward pass for a model all of whose layers have a rule.

Which models those are follows from the layers alone: an nn.Sequential, nested or not, or a single layer. PyTorch's own
code says what runs between the layers, and every parameter serves one layer, once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from discreet.privacy.rules.attention import ATTENTION_RULES, covers
from discreet.privacy.rules.convolution import CONVOLUTION_RULES
from discreet.privacy.rules.linear import LINEAR_RULES
from discreet.privacy.rules.normalisation import NORMALISATION_RULES
from discreet.privacy.rules.objective import LOSS_SCALE, Objective, logit_gradients
from discreet.privacy.rules.perceptron import is_perceptron, perceptron_terms
from discreet.privacy.rules.recurrent import RECURRENT_RULES
from discreet.privacy.rules.tape import Rule, Tape, Use, unchanged
from discreet.privacy.rules.terms import Term

RULES: dict[type[nn.Module], Rule] = {
    **LINEAR_RULES,
    **CONVOLUTION_RULES,
    **NORMALISATION_RULES,
    **RECURRENT_RULES,
    **ATTENTION_RULES,
}


def layers_with_rules(model: nn.Module) -> list[nn.Module] | None:
    """The layers of a model in the order in which they run; None if one has no rule or shares its parameters."""
    layers = _layers(model)
    if layers is None:
        return None
    parts = (part for layer in layers for part in layer.modules())
    used = [id(value) for part in parts for value in part._parameters.values() if value is not None]
    return layers if len(used) == len(set(used)) else None


def _layers(model: nn.Module) -> list[nn.Module] | None:
    if not unchanged(model):
        return None
    if type(model) is nn.Sequential:
        parts = [_layers(part) for part in model]
        return None if None in parts else [layer for part in parts if part is not None for layer in part]
    known = type(model) in RULES and (not isinstance(model, nn.TransformerEncoderLayer) or covers(model))
    return [model] if known else None


def one_pass(objective: Objective, layers: Sequence[nn.Module], inputs: Tensor, targets: Tensor) -> list[Term]:
    """Terms of the gradients of LOSS_SCALE times the loss, for n >= 1 examples, in the order of the layers.

    Raises:
      ValueError: what a layer reads does not have the examples in its first dimension.
    """
    known = objective.has_known_gradient(targets)
    if known and is_perceptron(layers, inputs):
        return perceptron_terms(layers, inputs, targets, slots=objective.layout.slots)
    tape = Tape(objective.layout.slots, len(inputs), objective.order)
    with torch.enable_grad():
        outputs = inputs
        for layer in layers:
            outputs = RULES[type(layer)](tape, layer, outputs)
    pairs = zip(tape.uses, _output_gradients(objective, outputs, targets, tape.uses), strict=True)
    return [term for use, grads in pairs if grads is not None for term in use.terms(grads)]


def _output_gradients(
    objective: Objective, outputs: Tensor, targets: Tensor, uses: Sequence[Use]
) -> Sequence[Tensor | None]:
    """The gradient of LOSS_SCALE times the loss at the outputs of each use."""
    edges = [use.edge for use in uses]
    if objective.has_known_gradient(targets) and outputs.dim() == 2:
        return torch.autograd.grad(outputs, edges, logit_gradients(outputs, targets), allow_unused=True)
    with torch.enable_grad():
        losses = objective.losses(outputs, targets)
    return torch.autograd.grad(losses, edges, torch.full_like(losses, LOSS_SCALE), allow_unused=True)
