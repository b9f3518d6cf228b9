"""Clipped sums of per-example gradients, the quantity that DP-SGD releases with noise.

If every layer of a model has a rule, one forward and one backward pass give the norms of all per-example gradients from
layer inputs and output gradients, and one matrix product a layer gives the clipped sum (`terms.py` has the
formulas and their sources). Rules serve an nn.Sequential, nested or not, or a single layer, in which every parameter
serves one layer, once. They serve a model with a forward of its own if each of its operations is known to treat every
example alone (`graph.py`). torch.func serves every other model (`any_model.py`), and the log "discreet"
says so once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

from discreet.per_example.any_model import built_terms, plain_gradient
from discreet.per_example.convolution import CONVOLUTION_RULES
from discreet.per_example.graph import CONFUSED, Program, Run, is_shared, made_up, program_of
from discreet.per_example.layer_rules import LAYER_RULES, check_layers, covers_bag, covers_dimension
from discreet.per_example.linear import is_perceptron, linear, perceptron_terms
from discreet.per_example.objective import LOSS_SCALE, Loss, Objective, cross_entropy, logit_gradients, objective_of
from discreet.per_example.operations import Unserved
from discreet.per_example.recurrent import SEQUENCE_RULES, covers_encoder
from discreet.per_example.terms import Parts, Rule, Tape, Term, Use, unchanged, without
from discreet.per_example.trial import AGREEMENT, same_chance, try_out, unmoved
from discreet.privacy.clipping import check_clip, clip_factors

RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear,
    **LAYER_RULES,
    **CONVOLUTION_RULES,
    **SEQUENCE_RULES,
}
# For classes of layers that a rule does not cover with all settings: True if it covers this layer.
_COVERS: dict[type[nn.Module], Callable[[Any], bool]] = {
    nn.TransformerEncoderLayer: covers_encoder,
    nn.EmbeddingBag: covers_bag,
    **dict.fromkeys((nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.GLU), covers_dimension),
}
# The parts of a container that run one after the other. An encoder has no mask if it is one layer of several.
_IN_SERIES: dict[type[nn.Module], Callable[[Any], list[nn.Module]]] = {
    nn.Sequential: list,
    nn.TransformerEncoder: lambda model: [*model.layers, *([] if model.norm is None else [model.norm])],
}
_UNSCALE = torch.tensor(1 / LOSS_SCALE)
# With fewer rows other kernels run, which round otherwise: a single one is no matrix. What fills up counts nothing.
_FEWEST_ROWS = 4
# Floats of gradients that are built at once, if they have to be: 256 MB of float32.
_BUILT_FLOATS = 2**26
Batch = tuple[Tensor, Tensor]  # inputs and targets
Way = list[nn.Module] | Program | None  # layers in their order, a graph of layers and operations, or torch.func


def clipped_gradient_sum(
    model: nn.Module, inputs: Tensor, *, targets: Tensor, clip_norm: float, loss: Loss = cross_entropy
) -> tuple[Tensor, Tensor]:
    """The sum of per-example gradients, each clipped to an L2 norm, and the norms before clipping.

    With g_i the gradient of example i's loss, total = sum_i g_i min(1, C / ||g_i||) with C = clip_norm (Abadi et
    al. 2016, Algorithm 1, without the noise). Sums of parts of a batch add up to that of the batch.

    Args:
      model: all float32 or all float64; called on whole batches, and left as it was (gradients, hooks, modes).
      inputs: (n, ...), of any type that the model takes.
      targets: (n, ...), as the loss takes them.
      clip_norm: C, as `check_clip` allows, in the gradient's units.
      loss: from outputs (n, ...) and targets to one value an example, (n,), that depends on that example alone.

    Returns:
      total, (num_params,), in the order of model.parameters(), tied parameters once, zero for frozen ones.
      norms, (n,), no less than the true ones at any scale (beyond 1e-18). A gradient that is not finite, or whose
      squared norm overflows, counts as zero in the sum, and its norm is inf.

    Sensitivity: adding or removing one example changes total by at most C in L2 norm, up to the rounding of the float
    sum and of the other gradients, for which kernels may depend on n (`sequential_sum` leaves none of the latter).
    n = 0 gives zeros and no norms.

    Raises:
      ValueError: a setting out of range; a layer that mixes examples (BatchNorm in training mode); parameters of
        other types or on several devices; a loss that is not (n,).

    Dropout and other layers that draw for each example by itself are allowed: the bound holds for each fixed choice of
    all masks. They come from PyTorch's own generator, whose seed must be secret if the sum is released, since places in
    a batch shift if an example is missing. Discreet's clients and DPSGD see to that.

    >>> x, y = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([0, 1])
    >>> total, norms = clipped_gradient_sum(nn.Linear(2, 2), x, targets=y, clip_norm=0.25)
    >>> total.shape, bool(total.norm() <= 0.5), bool((norms > 0).all())
    (torch.Size([6]), True, True)
    """
    check_clip(clip_norm, "clip_norm")
    return _clipped_sum(objective_of(model, loss), inputs, targets, clip_norm)


def l1_clipped_gradient_sum(
    model: nn.Module, inputs: Tensor, *, targets: Tensor, clip_norm: float, loss: Loss = cross_entropy
) -> tuple[Tensor, Tensor]:
    """As `clipped_gradient_sum` with L1 norms: one example changes the sum by at most C in L1, for Laplace noise."""
    check_clip(clip_norm, "clip_norm")
    return _clipped_sum(objective_of(model, loss, order=1), inputs, targets, clip_norm)


def sequential_sum(
    model: nn.Module, inputs: Tensor, *, targets: Tensor, clip_norm: float, loss: Loss = cross_entropy
) -> Tensor:
    """The total of `clipped_gradient_sum` by a pass for each example: 5 (CNN) to 60 times (LR) as slow.

    The rounding of a kernel may depend on the number of rows and on a row's place in memory. Here each example is
    alone, in memory of its own: one more or less leaves the gradients of the others as they are, to the last bit.
    """
    check_clip(clip_norm, "clip_norm")
    objective = objective_of(model, loss)
    total, _ = _clipped_sum(objective, inputs[:0], targets[:0], clip_norm)
    for place in range(len(inputs)):
        one = [place]  # a list copies
        total += _clipped_sum(objective, inputs[one], targets[one], clip_norm)[0]
    return total


def _clipped_sum(objective: Objective, inputs: Tensor, targets: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    if inputs.shape[0] != targets.shape[0]:
        raise ValueError(f"inputs and targets must be equally many, not {inputs.shape[0]} and {targets.shape[0]}")
    parameters = objective.parameters
    if len(inputs) == 0 or not objective.slots:
        return Parts(parameters).total(), parameters[0].new_zeros(len(inputs), requires_grad=False)
    with torch.set_grad_enabled(False):
        way = _way(objective, inputs, targets)
        if way is not None:
            try:
                return _summed(objective, way, [(inputs, targets)], clip)
            except Unserved:  # of this batch; what its examples do to each other is not known
                pass
        step = max(1, _BUILT_FLOATS // sum(value.numel() for value in parameters))
        pieces = zip(torch.split(inputs, step), torch.split(targets, step), strict=True)
        with unmoved(objective.model):
            return _summed(objective, None, pieces, clip, least=min(step, _FEWEST_ROWS))


def _filled(batch: Batch, least: int) -> Batch:
    """A batch with its last row again until there are so many."""
    count = len(batch[0])
    if count >= least:
        return batch
    inputs, targets = (part[torch.arange(least, device=part.device).clamp_(max=count - 1)] for part in batch)
    return inputs, targets


def _summed(
    objective: Objective, way: Way, batches: Iterable[Batch], clip: float, *, least: int = _FEWEST_ROWS
) -> tuple[Tensor, Tensor]:
    parts, found = None, []
    for batch in batches:
        count = len(batch[0])
        terms, norms = _finite_terms(objective, way, _filled(batch, least))
        weights = clip_factors(norms, clip * LOSS_SCALE)
        if count < len(norms):
            weights[count:], norms = 0, norms[:count]
        parts = parts or Parts(objective.parameters)  # after the backward pass, whose memory the sum can have
        while terms:  # last layer first: each lets go of its activations before the next, larger ones are scaled
            terms.pop().add_to(parts, weights, 1 / LOSS_SCALE)
        found.append(norms * _UNSCALE)
    assert parts is not None
    return parts.total(), found[0] if len(found) == 1 else torch.cat(found)


def _finite_terms(objective: Objective, way: Way, batch: Batch) -> tuple[list[Term], Tensor]:
    """Terms of the examples, zero for those whose gradient is not finite, and the norms (n,), inf for the same.

    Zeros take the place of such an example in the terms, since in the products 0 * inf would poison the sum. There is
    no second pass without it: dropout would draw other masks for the others, and what they add would depend on it.
    """
    terms = built_terms(objective, *batch) if way is None else one_pass(objective, way, *batch)
    if not terms:
        return terms, objective.parameters[0].new_zeros(len(batch[0]))
    # A product of two masses may be below the smallest float: such a norm is nothing to the least clip norm.
    total = reduce(add, (term.mass(objective.order) for term in terms))
    norms = total if objective.order == 1 else total.sqrt()
    if math.isfinite(norms.sum()):
        return terms, norms
    lost = ~norms.isfinite()
    return [without(term, lost) for term in terms], norms.masked_fill(lost, math.inf)


def layers_with_rules(model: nn.Module) -> list[nn.Module] | None:
    """The layers of a model in the order in which they run; None if one has no rule or shares its parameters."""
    layers = _layers(model)
    return None if layers is None or is_shared(layers, ()) else layers


def _layers(model: nn.Module) -> list[nn.Module] | None:
    if not unchanged(model):
        return None
    in_series = _IN_SERIES.get(type(model))
    if in_series is None:
        return [model] if has_rule(model) else None
    parts = [_layers(part) for part in in_series(model)]
    return None if None in parts else [layer for part in parts if part is not None for layer in part]


def has_rule(layer: nn.Module) -> bool:
    """True if a rule covers a layer with these settings."""
    covers_it = _COVERS.get(type(layer))
    return type(layer) in RULES and (covers_it is None or covers_it(layer))


def _way(objective: Objective, inputs: Tensor, targets: Tensor) -> Way:
    """The way to serve a model. A model and a loss that are new here are tried first, on made-up examples."""
    layers = layers_with_rules(objective.model)
    if layers is None:
        check_layers(objective.model)
    try_out(objective, inputs, targets, has_rules=layers is not None)
    if layers is not None:
        return layers
    return program_of(objective.model, has_rule, lambda program: _agrees(objective.model, program, inputs))


def _agrees(model: nn.Module, program: Program, inputs: Tensor) -> bool:
    """True if a program has the gradients of its model on three made-up examples of the shape of the inputs.

    No example of the batch decides it: else one could change by which of two ways the gradients of others are found.
    """

    def every_output_counts_otherwise(outputs: Tensor, targets: Tensor) -> Tensor:
        rows = outputs.reshape(len(targets), -1)
        return rows @ torch.linspace(-1, 2, rows.shape[1], dtype=rows.dtype, device=rows.device)

    objective, targets = objective_of(model, every_output_counts_otherwise), inputs.new_zeros(3)
    try:
        with same_chance(inputs):  # the program first: a model that it can't serve may change itself
            terms = one_pass(objective, program, made_up(model, inputs), targets)
        with same_chance(inputs):
            wanted = plain_gradient(objective, made_up(model, inputs), targets)
    except (Unserved, *CONFUSED):
        return False
    parts, weights = Parts(objective.parameters), wanted[0].new_ones(3)
    for term in terms:
        term.add_to(parts, weights, 1.0)
    margin = max(float(value.norm()) for value in wanted) * AGREEMENT
    pairs = zip(objective.slots.values(), wanted, strict=True)
    return all(float((parts[slot.index] - value).norm()) <= margin for slot, value in pairs)


def one_pass(objective: Objective, way: list[nn.Module] | Program, inputs: Tensor, targets: Tensor) -> list[Term]:
    """Terms of the gradients of LOSS_SCALE times the loss, for n >= 1 examples, in the order of the layers.

    Raises:
      ValueError: what a layer of a sequence reads does not have the examples in its first dimension.
      Unserved: a program of which that, or what else it needs, does not hold for these examples.
    """
    known = objective.has_known_gradient(targets)
    if known and isinstance(way, list) and is_perceptron(way, inputs):
        return perceptron_terms(way, inputs, targets, slots=objective.slots)
    tape = Tape(objective.slots, len(inputs), objective.order)
    with torch.enable_grad():
        if isinstance(way, Program):
            outputs = Run(tape, dict(objective.model.named_modules()), RULES).outputs(way, inputs)
        else:
            outputs = reduce(lambda values, layer: RULES[type(layer)](tape, layer, values), way, inputs)
    if not tape.uses or not outputs.requires_grad:
        return []
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
