"""Clipped sums of per-example gradients, the quantity that DP-SGD releases with noise.

The model's own forward runs on the whole batch and is watched (`watch.py`): every operation between its parameters is
checked to treat each example alone, and functions that read parameters note what gives the norms of all per-example
gradients from their inputs and output gradients, without building them (`terms.py` has the formulas and their
sources). One backward pass then gives the norms, and one matrix product a parameter the clipped sum. What can't be
watched goes by torch.func, or one example after the other (`any_model.py`), and the log "discreet" says so once, with
the line of the forward that is the reason. A forward that mixes examples is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from discreet.per_example.any_model import built_terms, plain_gradient
from discreet.per_example.branches import Split
from discreet.per_example.combined import combined
from discreet.per_example.layouts import FEWEST, FIRST, MixesExamples, Unserved
from discreet.per_example.objective import (
    LOSS_SCALE,
    Loss,
    Objective,
    Tree,
    as_tree,
    count_of,
    cross_entropy,
    filled,
    given,
    logit_gradients,
    objective_of,
    one_each,
    rows_of,
)
from discreet.per_example.perceptron import perceptron, perceptron_terms
from discreet.per_example.terms import Parts, Tape, Term, Use, without
from discreet.per_example.trial import (
    AGREEMENT,
    COARSE_AGREEMENT,
    CONFUSED,
    Undrawn,
    check_layers,
    goes_alone,
    made_up,
    same_chance,
    try_out,
    unmoved,
)
from discreet.per_example.watch import Watch
from discreet.privacy.clipping import check_clip, clip_factors

_UNSCALE = torch.tensor(1 / LOSS_SCALE)
# Floats of gradients that are built at once, if they have to be: 256 MB of float32.
_BUILT_FLOATS = 2**26
# A made-up example may stand at a kink, of a ReLU or a maximum, where rounding decides; a wrong rule is wrong for all.
_TRIALS, _MADE_UP = 3, 7  # seven: a number that is seldom another size of a model, too
# Groups of examples that answer a forward's questions alike: of eight at least on average, if there are many.
_MOST_GROUPS, _FEWEST_IN_A_GROUP = 8, 8
# By model: its state when it was last tried, and the reason why it can't be watched, or "".
_reasons: WeakKeyDictionary[nn.Module, tuple[object, str]] = WeakKeyDictionary()


def clipped_gradient_sum(
    model: nn.Module, inputs: Tree, *, targets: Tree = None, clip_norm: float, loss: Loss = cross_entropy
) -> tuple[Tensor, Tensor]:
    """The sum of per-example gradients, each clipped to an L2 norm, and the norms before clipping.

    With g_i the gradient of example i's loss, total = sum_i g_i min(1, C / ||g_i||) with C = clip_norm (Abadi et
    al. 2016, Algorithm 1, without the noise). Sums of parts of a batch add up to that of the batch.

    Args:
      model: float32, float64 or bfloat16; called on whole batches, and left as it was (gradients, hooks, modes).
      inputs: (n, ...), of any type that the model takes; a tuple of tensors for its arguments, or a mapping or a
        dataclass for its arguments by name, each tensor with one row an example.
      targets: (n, ...), as the loss takes them; None: the loss is given the inputs.
      clip_norm: C, as `check_clip` allows, in the gradient's units.
      loss: from what the model gives and targets to one value an example, (n,), that depends on that example alone.

    Returns:
      total, (num_params,), of the trainable parameters in the order of model.parameters(), tied ones once; float32 for
        bfloat16 parameters, and under torch.autocast, which holds for the model and the loss alone.
      norms, (n,), no less than the true ones at any scale (beyond 1e-18). A gradient that is not finite, or whose
      squared norm overflows, counts as zero in the sum, and its norm is inf.

    Sensitivity: adding or removing one example changes total by at most C in L2 norm, up to the rounding of the float
    sum and of the other gradients, for which kernels may depend on n (`sequential_sum` leaves none of the latter).
    n = 0 gives zeros and no norms.

    Raises:
      ValueError: a setting out of range; a forward or a layer that mixes examples (BatchNorm in training mode);
        parameters of other types or on several devices; a loss that is not (n,).

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
    model: nn.Module, inputs: Tree, *, targets: Tree = None, clip_norm: float, loss: Loss = cross_entropy
) -> tuple[Tensor, Tensor]:
    """As `clipped_gradient_sum` with L1 norms: one example changes the sum by at most C in L1, for Laplace noise."""
    check_clip(clip_norm, "clip_norm")
    return _clipped_sum(objective_of(model, loss, order=1), inputs, targets, clip_norm)


def sequential_sum(
    model: nn.Module, inputs: Tree, *, targets: Tree = None, clip_norm: float, loss: Loss = cross_entropy
) -> Tensor:
    """The total of `clipped_gradient_sum` by a pass for each example: 5 (CNN) to 60 times (LR) as slow.

    The rounding of a kernel may depend on the number of rows and on a row's place in memory. Here each example is
    alone, in memory of its own: one more or less leaves the gradients of the others as they are, to the last bit.
    """
    check_clip(clip_norm, "clip_norm")
    objective, inputs = objective_of(model, loss), as_tree(inputs)
    targets = inputs if targets is None else as_tree(targets)
    total, _ = _clipped_sum(objective, rows_of(inputs, slice(0, 0)), rows_of(targets, slice(0, 0)), clip_norm)
    for place in range(count_of(inputs)):
        one = [place]  # a list copies
        total += _clipped_sum(objective, rows_of(inputs, one), rows_of(targets, one), clip_norm)[0]
    return total


def _clipped_sum(objective: Objective, inputs: Any, targets: Any, clip: float) -> tuple[Tensor, Tensor]:
    inputs = as_tree(inputs)
    targets = inputs if targets is None else as_tree(targets)
    count = count_of(inputs, targets)
    if count == 0 or not objective.slots:
        return _parts(objective).total(), _zeros(objective, count)
    with torch.set_grad_enabled(False), objective.casting(on=False):
        by_hand = objective.has_known_gradient(targets) and not objective.rounds
        layers = perceptron(objective.model, inputs) if by_hand else None
        if layers is not None:
            return _summed(objective, [_by_hand(objective, layers, inputs, targets)], clip, count)
        reason = _tried(objective, inputs, targets)
        if not reason:
            try:
                return _summed(objective, _passes(objective, inputs, targets), clip, count)
            except Unserved as found:  # of this batch; what its examples do to each other is not known
                reason = str(found)
        with unmoved(objective.model):
            return _summed(objective, _built(objective, inputs, targets, reason), clip, count)


def _parts(objective: Objective) -> Parts:
    return Parts([slot.shape for slot in objective.slots.values()], _zeros(objective, 0))


def _zeros(objective: Objective, count: int) -> Tensor:
    return objective.parameters[0].new_zeros(count, dtype=objective.dtype, requires_grad=False)


def _tried(objective: Objective, inputs: Tree, targets: Tree) -> str:
    """Tries a model and a loss that are new here, on made-up examples. The reason why it can't be watched, or ""."""
    model = objective.model
    state = [(id(part), part.training, id(part.__dict__.get("forward"))) for part in objective.modules]
    key = state, objective.slots.keys(), objective.rounds
    is_new = model not in _reasons or _reasons[model][0] != key
    if is_new:
        check_layers(model)
    try_out(objective, inputs, targets)
    if is_new:
        _reasons[model] = (key, _disagreement(model, inputs))
    return _reasons[model][1]


@dataclass(frozen=True, slots=True)
class _Part:
    """Gradients of some examples: their places in the batch, None for all, and terms of `rows` rows, which begin with
    theirs."""

    places: Tensor | None
    rows: int
    terms: list[Term]


def _passes(objective: Objective, inputs: Tree, targets: Tree) -> Iterator[_Part]:
    """One pass over all examples; or one for each group of examples for which a forward takes the same branches.

    Raises:
      Unserved: too many groups.
    """
    count = count_of(inputs)
    rows = max(count, FEWEST)
    try:
        terms = one_pass(objective, filled(inputs, rows), filled(targets, rows))
    except Split as split:
        answers, groups = torch.unique(split.answers[:count], return_inverse=True)
        if len(answers) > max(_MOST_GROUPS, count // _FEWEST_IN_A_GROUP):
            raise Unserved(f"examples have {len(answers)} answers to {split.where}") from split
        for group in range(len(answers)):
            places = (groups == group).nonzero().squeeze(1)
            for inner in _passes(objective, rows_of(inputs, places), rows_of(targets, places)):
                yield _Part(places if inner.places is None else places[inner.places], inner.rows, inner.terms)
        return
    yield _Part(None, rows, terms)


def _by_hand(objective: Objective, layers: list[nn.Module], inputs: Tensor, targets: Tensor) -> _Part:
    rows = max(len(inputs), FEWEST)
    terms = perceptron_terms(layers, filled(inputs, rows), filled(targets, rows), slots=objective.slots)
    return _Part(None, rows, combined(terms, objective.order))


def _built(objective: Objective, inputs: Tree, targets: Tree, reason: str) -> Iterator[_Part]:
    """Gradients that torch.func builds, for some examples at a time."""
    count, device = count_of(inputs), objective.parameters[0].device
    step = max(1, _BUILT_FLOATS // sum(slot.shape.numel() for slot in objective.slots.values()))
    for start in range(0, count, step):
        places = torch.arange(start, min(start + step, count), device=device)
        rows = max(len(places), min(step, FEWEST))
        some = [filled(rows_of(tree, places), rows) for tree in (inputs, targets)]
        yield _Part(places, rows, built_terms(objective, *some, reason=reason))


def _summed(objective: Objective, parts: Iterable[_Part], clip: float, count: int) -> tuple[Tensor, Tensor]:
    total, norms = None, None
    for part in parts:
        terms, found = _finite(objective, part)
        held = count if part.places is None else len(part.places)
        weights = clip_factors(found, clip * LOSS_SCALE)
        if held < part.rows:
            weights[held:] = 0  # what fills up counts nothing
        total = total or _parts(objective)  # after the backward pass, whose memory the sum can have
        while terms:  # last layer first: each lets go of its activations before the next, larger ones are scaled
            terms.pop().add_to(total, weights, 1 / LOSS_SCALE)
        found = found[:held] * _UNSCALE
        if part.places is None:
            norms = found
        else:
            norms = found.new_zeros(count) if norms is None else norms
            norms[part.places] = found
    assert total is not None
    assert norms is not None
    return total.total(), norms


def _finite(objective: Objective, part: _Part) -> tuple[list[Term], Tensor]:
    """Terms of the examples, zero for those whose gradient is not finite, and the norms (rows,), inf for the same.

    Zeros take the place of such an example in the terms, since in the products 0 * inf would poison the sum. There is
    no second pass without it: dropout would draw other masks for the others, and what they add would depend on it.
    """
    terms = part.terms
    if not terms:
        return terms, _zeros(objective, part.rows)
    # A product of two masses may be below the smallest float: such a norm is nothing to the least clip norm.
    total = reduce(add, (term.mass(objective.order) for term in terms))
    norms = total if objective.order == 1 else total.sqrt()
    if math.isfinite(norms.sum()):
        return terms, norms
    lost = ~norms.isfinite()
    return [without(term, lost) for term in terms], norms.masked_fill(lost, math.inf)


def one_pass(objective: Objective, inputs: Tree, targets: Tree, *, counts: bool = True) -> list[Term]:
    """Terms of the gradients of LOSS_SCALE times the loss, for n >= `FEWEST` examples, one for each parameter.

    Raises:
      ValueError: the forward mixes examples.
      Unserved: it can't be shown that each example goes through the model alone.
      Split: a branch of the forward asks for examples that answer alike.
    """
    tape = Tape(objective.slots, count_of(inputs), objective.order)
    watch = Watch(tape, objective.modules, counts=counts)
    try:
        outputs, losses = _watched(objective, watch, inputs, targets)
    except (Unserved, MixesExamples) as first:
        if not watch.counted:
            raise
        try:
            return one_pass(objective, inputs, targets, counts=False)
        except Unserved as found:
            raise (first if isinstance(first, Unserved) else found) from first
    source = outputs if losses is None else losses
    if not tape.uses or not source.requires_grad:
        return []
    pairs = zip(tape.uses, _output_gradients(objective, outputs, losses, targets, tape.uses), strict=True)
    terms = [term for use, grads in pairs if grads is not None for term in use.terms(grads.to(objective.dtype))]
    return combined(terms, objective.order)


def _watched(objective: Objective, watch: Watch, inputs: Tree, targets: Tree) -> tuple[Any, Tensor | None]:
    """The outputs of a forward that is watched, and the losses if they follow from several outputs."""
    watch.rows(inputs)
    losses = None
    with torch.enable_grad(), watch:
        outputs = objective.outputs(inputs)
        if not isinstance(outputs, Tensor) or watch.tag(outputs) != FIRST:  # the loss picks what it needs of it
            watch.rows(targets)
            with objective.casting():
                losses = objective.loss(outputs, given(targets))
    watch.check(outputs if losses is None else one_each(losses, watch.count))
    return outputs, losses


def _output_gradients(
    objective: Objective, outputs: Any, losses: Tensor | None, targets: Tree, uses: Sequence[Use]
) -> Sequence[Tensor | None]:
    """The gradient of LOSS_SCALE times the loss at the outputs of each use."""
    edges = [use.edge for use in uses]
    if losses is None and objective.has_known_gradient(targets) and outputs.dim() == 2:
        return torch.autograd.grad(outputs, edges, logit_gradients(outputs, targets), allow_unused=True)
    if losses is None:
        with torch.enable_grad():
            losses = objective.losses(outputs, targets)
    return torch.autograd.grad(losses, edges, torch.full_like(losses, LOSS_SCALE), allow_unused=True)


def _disagreement(model: nn.Module, inputs: Tree) -> str:
    """Tries a model on made-up examples: the reason why it can't be watched, "" if what is found is what plain autograd
    finds for each of them alone. Nothing is drawn at random: dropout keeps everything.

    No example of the batch decides it: else one could change by which of two ways the gradients of others are found.
    """

    def every_row_counts_otherwise(outputs: Any, targets: Tensor) -> Tensor:
        values = [value for value in tree_leaves(outputs) if isinstance(value, Tensor) and value.is_floating_point()]
        count = len(targets)
        if count > 1:  # another output, such as a mean, is an error only if a loss needs it
            shapes = (list(map(int, value.shape)) for value in values)
            counted[:] = [(place, sizes.index(count)) for place, sizes in enumerate(shapes) if count in sizes]
            values = [values[place].movedim(dim, 0) for place, dim in counted]
        else:
            values = [values[place] for place, _ in counted]
        rows = torch.cat([value.reshape(count, -1) for value in values], 1)
        return rows @ torch.linspace(-1, 2, rows.shape[1], dtype=rows.dtype, device=rows.device)

    counted, objective = list[tuple[int, int]](), objective_of(model, every_row_counts_otherwise)
    reason, small = "", False
    for seed in range(_TRIALS):
        try:
            examples = made_up(model, inputs, _MADE_UP, seed, small=small)
            with same_chance(objective.parameters[0].device), Undrawn():
                reason = _tried_on(objective, examples)
        except Unserved as error:
            return str(error)
        except MixesExamples:
            raise
        except CONFUSED as error:
            reason, small = str(error), True
        if not reason:
            break
    return reason


def _tried_on(objective: Objective, examples: Tree) -> str:
    targets = _zeros(objective, _MADE_UP)
    try:
        found = _rows(objective, _passes(objective, examples, targets))
    except (MixesExamples, Unserved) as error:
        mixes = error if isinstance(error, MixesExamples) else error.__cause__  # of a size no other is by chance
        if not isinstance(mixes, MixesExamples):
            raise
        if goes_alone(objective, examples, targets):  # such as a sort that is undone again
            raise Unserved(mixes.reason) from None
        raise mixes from None
    part = COARSE_AGREEMENT if objective.rounds else AGREEMENT
    for place in range(_MADE_UP):
        one = slice(place, place + 1)
        alone = plain_gradient(objective, rows_of(examples, one), targets[one])
        margin = max(float(value.norm()) for value in alone) * part
        pairs = zip(objective.slots.values(), alone, strict=True)
        if any(float((found[place][slot.index] - value).norm()) > margin for slot, value in pairs):
            return "a made-up example has other gradients alone"
    return ""


def _rows(objective: Objective, parts: Iterable[_Part]) -> list[Parts]:
    """The gradient of each example by itself."""
    found = [_parts(objective) for _ in range(_MADE_UP)]
    for part in parts:
        for row, place in enumerate(range(_MADE_UP) if part.places is None else part.places.tolist()):
            chosen = _zeros(objective, part.rows)
            chosen[row] = 1
            for term in part.terms:
                term.add_to(found[place], chosen, 1.0)
    return found
