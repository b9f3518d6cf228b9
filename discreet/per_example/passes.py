"""Passes that give the terms of per-example gradients, and their trial on made-up examples.

A forward may ask for one answer of all examples, such as `mask.all()`. Examples that answer differently are run apart
(`branches.py`). But if made-up examples that answer differently have the same gradients with the answer that such a
batch gives, that answer is given for every batch: the question chooses among ways to compute the same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from discreet.per_example.any_model import plain_gradient
from discreet.per_example.attributes import put_back
from discreet.per_example.branches import Question, Split
from discreet.per_example.convolution import Convolved
from discreet.per_example.layouts import FEWEST, FIRST, MixesExamples, Unserved
from discreet.per_example.objective import (
    LOSS_SCALE,
    Objective,
    Tree,
    count_of,
    filled,
    given,
    logit_gradients,
    objective_of,
    one_each,
    rows_of,
)
from discreet.per_example.terms import Lookup, Outer, Pair, Parts, Rows, Slot, Term, Tied
from discreet.per_example.trial import (
    AGREEMENT,
    COARSE_AGREEMENT,
    CONFUSED,
    Undrawn,
    floats_in,
    goes_alone,
    made_up,
    same_chance,
)
from discreet.per_example.watch import Watch

Back = Callable[[nn.Module, Tensor, Tensor], Tensor]  # from the layer, its outputs and the gradients there

# Autograd's own: a product with a mask takes eight times as long.
_relu_backward = torch.ops.aten.threshold_backward.default

_BACKWARD: dict[type[nn.Module], Back] = {
    nn.Linear: lambda layer, outputs, grads: grads @ layer.weight,  # type: ignore[operator]
    nn.ReLU: lambda layer, outputs, grads: _relu_backward(grads, outputs, 0),
    nn.Tanh: lambda layer, outputs, grads: torch.addcmul(grads, grads * outputs, outputs, value=-1),
}
# A made-up example may stand at a kink, of a ReLU or a maximum, where rounding decides; a wrong rule is wrong for all.
_TRIALS, _MADE_UP = 3, 7  # seven: a number that is seldom another size of a model, too


@dataclass(frozen=True, slots=True)
class Part:
    """Gradients of some examples: their places in the batch, None for all, and terms of `rows` rows, which begin with
    theirs."""

    places: Tensor | None
    rows: int
    terms: list[Term]


@dataclass(frozen=True, slots=True)
class Questions:
    """Questions for one answer of all examples: those that made-up ones have answered differently (`asked`), and those
    of which the answer of such a batch serves all (`settled`)."""

    asked: set[Question] = field(default_factory=set)
    settled: frozenset[Question] = frozenset()


def passes(objective: Objective, inputs: Tree, targets: Tree, questions: Questions) -> Iterator[Part]:
    """One pass over all examples; or one for each group of examples for which a forward takes the same branches.

    Raises:
      Unserved: too many groups.
    """
    count = count_of(inputs)
    rows = max(count, FEWEST)
    try:
        terms = one_pass(objective, filled(inputs, rows), filled(targets, rows), questions.settled)
    except Split as split:
        questions.asked.update([split.question] if split.question else [])
        for places in split.groups(count):
            for inner in passes(objective, rows_of(inputs, places), rows_of(targets, places), questions):
                yield Part(places if inner.places is None else places[inner.places], inner.rows, inner.terms)
        return
    yield Part(None, rows, terms)


def one_pass(
    objective: Objective,
    inputs: Tree,
    targets: Tree,
    settled: frozenset[Question] = frozenset(),
    *,
    counts: bool = True,
) -> list[Term]:
    """Terms of the gradients of LOSS_SCALE times the loss, for n >= `FEWEST` examples, one for each parameter.

    Raises:
      ValueError: the forward mixes examples.
      Unserved: it can't be shown that each example goes through the model alone.
      Split: a branch of the forward asks for examples that answer alike.
    """
    watch = Watch(objective.slots, count_of(inputs), objective.modules, counts=counts)
    watch.settled = settled
    try:
        with put_back(objective.kept):
            outputs, losses = _watched(objective, watch, inputs, targets)
    except (Unserved, MixesExamples) as first:
        if not watch.counted:
            raise
        try:
            return one_pass(objective, inputs, targets, settled, counts=False)
        except Unserved as found:
            raise (first if isinstance(first, Unserved) else found) from first
    source = outputs if losses is None else losses
    if not watch.uses or not source.requires_grad:
        return []
    edges = [edge for edge, _ in watch.uses]
    pairs = zip(watch.uses, _output_gradients(objective, outputs, losses, targets, edges), strict=True)
    held = [term for (_, terms), grads in pairs if grads is not None for term in terms(grads.to(objective.dtype))]
    return combined(held, objective.order)


def _watched(objective: Objective, watch: Watch, inputs: Tree, targets: Tree) -> tuple[Any, Tensor | None]:
    """The outputs of a forward that is watched, and the losses if they follow from several outputs."""
    watch.rows(inputs)
    losses = None
    with torch.enable_grad(), watch:
        outputs = objective.outputs(inputs)
        is_rows = isinstance(outputs, Tensor) and watch.tag(outputs) == FIRST
        if not (is_rows and objective.is_own_loss):  # another one may read what the forward left on its modules
            watch.rows(targets)
            watch.in_loss = not objective.is_own_loss
            with objective.casting():
                losses = objective.loss(outputs, given(targets))
    watch.check(outputs if losses is None else one_each(losses, watch.count))
    return outputs, losses


def _output_gradients(
    objective: Objective, outputs: Any, losses: Tensor | None, targets: Tree, edges: Sequence[GradientEdge]
) -> Sequence[Tensor | None]:
    """The gradient of LOSS_SCALE times the loss at the outputs of each use."""
    if losses is None and objective.has_known_gradient(targets) and outputs.dim() == 2:
        return torch.autograd.grad(outputs, edges, logit_gradients(outputs, targets), allow_unused=True)
    if losses is None:
        with torch.enable_grad():
            losses = objective.losses(outputs, targets)
    return torch.autograd.grad(losses, edges, torch.full_like(losses, LOSS_SCALE), allow_unused=True)


def tried(model: nn.Module, inputs: Tree) -> tuple[str, Questions]:
    """Tries a model on made-up examples: the reason why it can't be watched, "" if what is found is what plain autograd
    finds for each of them alone; and its questions. Nothing is drawn at random: dropout keeps everything.

    No example of the batch decides it: else one could change by which of two ways the gradients of others are found.
    """

    def every_row_counts_otherwise(outputs: Any, targets: Tensor) -> Tensor:
        values = floats_in(outputs)
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
    reason, small, questions = "", False, Questions()
    for seed in range(_TRIALS):
        try:
            examples = made_up(model, inputs, _MADE_UP, seed, small=small)
            with same_chance(objective.parameters[0].device), Undrawn():
                reason = _tried_on(objective, examples, questions)
                questions = questions if reason else _settled(objective, examples, questions)
        except Unserved as error:
            return str(error), questions
        except MixesExamples:
            raise
        except CONFUSED as error:
            reason, small = str(error), True
        if not reason:
            break
    return reason, questions


def _settled(objective: Objective, examples: Tree, questions: Questions) -> Questions:
    """Settles as many questions as leave the gradients as they are."""
    while questions.asked:
        more = Questions(settled=questions.settled | questions.asked)
        try:
            reason = _tried_on(objective, examples, more)
        except (Unserved, MixesExamples, *CONFUSED) as error:
            reason = str(error)
        if reason:
            break
        questions = more
    return questions


def _tried_on(objective: Objective, examples: Tree, questions: Questions) -> str:
    targets = objective.zeros(_MADE_UP)
    try:
        found = _rows(objective, passes(objective, examples, targets, questions))
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


def _rows(objective: Objective, parts: Iterable[Part]) -> list[Parts]:
    """The gradient of each example by itself."""
    found = [objective.parts() for _ in range(_MADE_UP)]
    for part in parts:
        for row, place in enumerate(range(_MADE_UP) if part.places is None else part.places.tolist()):
            chosen = objective.zeros(part.rows)
            chosen[row] = 1
            for term in part.terms:
                term.add_to(found[place], chosen, 1.0)
    return found


def combined(terms: list[Term], order: int) -> list[Term]:
    """Terms of which no two are of one parameter: a parameter that is used several times has one gradient. The list is
    emptied: what several terms hold is let go of when they are one."""
    uses = Counter(slot.index for term in terms for slot in slots_of(term))
    found: list[Term] = []
    shared = defaultdict[int, list[Any]](list)
    while terms:
        term = terms.pop()
        if all(uses[slot.index] == 1 for slot in slots_of(term)):
            found.append(term.cheapest(order) if isinstance(term, Outer | Convolved) else term)
            continue
        for part in _apart(term):
            shared[part.slot.index].append(part)
    del term
    while shared:
        found.append(_one(shared.popitem()[1], order))
    return found[::-1]


def slots_of(term: Any) -> list[Slot]:
    """The parameters that a term is of."""
    slots = [term.weight, term.bias] if isinstance(term, Pair) else [term.slot]
    return [slot for slot in slots if slot is not None]


def _apart(term: Any) -> list[Any]:
    """A term as terms of one parameter each."""
    if not isinstance(term, Pair):
        return [term]
    bias = [] if term.bias is None else [Rows(term.bias, term.grads)]
    weight = None if term.weight is None else Outer(term.weight, term.inputs.unsqueeze(1), term.grads.unsqueeze(1))
    return bias if weight is None else [weight, *bias]


def _joined(parts: list[Any]) -> Any:
    """The sum of several terms of one kind and one parameter: their positions are one behind the other."""
    places = ("ids" if type(parts[0]) is Lookup else "inputs", "grads")
    return replace(parts[0], **{name: torch.cat([getattr(part, name) for part in parts], 1) for name in places})


def _one(parts: list[Any], order: int) -> Term:
    """The sum of several terms of one parameter."""
    if all(type(part) is Convolved for part in parts) and len({part.call for part in parts}) == 1:
        return _joined(parts).cheapest(order)  # type: ignore[no-any-return]
    parts = [part.outer() if type(part) is Convolved else part for part in parts]
    kinds = ([part for part in parts if type(part) is kind] for kind in (Outer, Lookup))
    joined, rest = [_joined(some) for some in kinds if some], [part for part in parts if type(part) is Rows]
    if not rest and len(joined) == 2:
        return Tied(lookup=joined[1], outer=joined[0])
    if not rest:
        return joined[0].cheapest(order) if type(joined[0]) is Outer else joined[0]
    rest += [part.built() for part in joined]
    slot = parts[0].slot
    if len({part.slot for part in rest}) > 1:
        rest, slot = [Rows(slot, part.slot.plain(part.values)) for part in rest], replace(slot, kernel_last=False)
    return Rows(slot, reduce(Tensor.add, (part.values.reshape(rest[0].values.shape) for part in rest)))


def by_hand(objective: Objective, inputs: Tree, targets: Tree) -> Part | None:
    """The pass of Linear, ReLU and Tanh on rows (n, d), behind an nn.Flatten() if there is one, for the cross-entropy;
    None for another model or loss. Gradients must be switched off.

    On such small models autograd costs as much as the products do: without it a clipped sum takes a third less time.
    """
    if objective.rounds or not objective.has_known_gradient(targets):
        return None
    layers = _in_series(objective.model)
    if not layers or not isinstance(inputs, Tensor) or not all(map(unchanged, layers)):
        return None
    first = layers[0]
    is_flat = type(first) is nn.Flatten and (first.start_dim, first.end_dim) == (1, -1)
    inner = layers[1:] if is_flat else layers
    if not (is_flat or inputs.dim() == 2) or not all(type(layer) in _BACKWARD for layer in inner):
        return None
    rows = max(len(inputs), FEWEST)
    values = [filled(inputs, rows)]
    for layer in layers:
        values.append(layer(values[-1]))
    found = _back(objective, inner, values[is_flat:], filled(targets, rows))
    return Part(None, rows, combined(found, objective.order))


def _in_series(model: nn.Module) -> list[nn.Module]:
    if type(model) is nn.Sequential and unchanged(model):
        return [layer for part in model for layer in _in_series(part)]
    return [model]


def _back(objective: Objective, layers: list[nn.Module], values: list[Tensor], targets: Tensor) -> list[Term]:
    """Terms of all linear layers, first layer first. values: the inputs of each layer, and what the last one gives."""
    grads, terms = logit_gradients(values[-1], targets), list[Term]()
    first = next((index for index, layer in enumerate(layers) if type(layer) is nn.Linear), len(layers))
    for index in range(len(layers) - 1, first - 1, -1):
        layer = layers[index]
        if type(layer) is nn.Linear:
            weight, bias = (objective.slots.get(id(value)) for value in (layer.weight, layer.bias))
            if weight or bias:
                terms.append(Pair(weight, bias, values[index], grads))
        if index > first:
            grads = _BACKWARD[type(layer)](layer, values[index + 1], grads)
    return terms[::-1]


def unchanged(layer: nn.Module) -> bool:
    """True if a layer does what its class says: there are no hooks, of its own or global, and no forward of its own."""
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return not (hooks or _has_global_hooks()) and "forward" not in layer.__dict__


def _has_global_hooks() -> bool:
    names = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
    return any(getattr(nn.modules.module, name) for name in (*names, "_global_backward_pre_hooks"))
