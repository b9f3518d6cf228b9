"""Passes that compute the terms of per-example gradients.

A forward may ask a question with one answer for all examples, such as `mask.all()`. Examples that
answer differently are run apart (`branches.py`). But if made-up examples that answer differently
have the same gradients with one answer for all, that answer is given for every batch: the question
only selects a way to compute the same result (`trial.py`).
"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.func import vmap

from discreet.layers.alone import Alone
from discreet.layers.branches import AnswersDiffer, Questions
from discreet.layers.computed import Computed, TakenBack
from discreet.layers.custom_functions import seen
from discreet.layers.draws import Draws
from discreet.layers.layer_rules import RULES
from discreet.layers.refusals import (
    CONFUSED,
    COPYING,
    DERIVING,
    SCRIPTED,
    Needs,
    Unserved,
    place_of_error,
)
from discreet.layers.terms import Lookup, Outer, Pair, Rows, Slot, Term, Tied, joined
from discreet.per_example.objective import (
    LOSS_SCALE,
    Objective,
    Tree,
    batches_in,
    count_of,
    detached,
    filled,
    is_of_package,
    logit_gradients,
    mapped,
    one_each,
    rows_of,
)

_COPIED_FLOATS = 2**26  # 256 MB of float32
FEWEST = 4  # least number of rows in a pass: smaller batches are padded


@dataclass(frozen=True, slots=True)
class GradientsOfSome:
    """Gradients of some examples: their indices in the batch, None for all, and terms of `rows`
    rows; the first rows are those of the examples."""

    places: Tensor | None
    rows: int
    terms: list[Term]

    def within(self, places: Tensor) -> GradientsOfSome:
        """The same, if the batch was itself a part of a larger one: the examples at `places`."""
        return replace(self, places=places if self.places is None else places[self.places])


def passes(
    objective: Objective, inputs: Tree, targets: Tree, questions: Questions, draws: Draws
) -> Iterator[GradientsOfSome]:
    """One pass over all examples, or one for each group of examples for which the forward takes the
    same branches.

    Raises:
      Unserved: too many groups, or vmap can't follow the forward.
    """
    count = count_of(inputs)
    rows = max(count, FEWEST)
    try:
        padded = filled(inputs, rows), filled(targets, rows)
        terms = needed_pass(objective, *padded, questions, draws.filled(rows))
    except AnswersDiffer as split:
        if split.question:
            questions.asked[split.question] = None
        groups = split.groups(count)
        if len(groups) < 2:
            raise Unserved(f"copies of one example round differently at {split.where}") from split
        for places in groups:
            some = rows_of(inputs, places), rows_of(targets, places)
            for inner in passes(objective, *some, questions, draws.of(places)):
                yield inner.within(places)
        return
    yield GradientsOfSome(None, rows, terms)


def needed_pass(
    objective: Objective, inputs: Tree, targets: Tree, questions: Questions, draws: Draws
) -> list[Term]:
    """As `one_pass`; one that turns out to need something is made again with it."""
    while True:
        try:
            return one_pass(objective, inputs, targets, questions, draws)
        except Needs as found:
            if found.need in questions.needs:
                raise
            questions.needs[found.need] = None


def one_pass(
    objective: Objective,
    inputs: Tree,
    targets: Tree,
    questions: Questions,
    draws: Draws,
) -> list[Term]:
    """Terms of the gradients of LOSS_SCALE times the loss, for n >= `FEWEST` examples, one for each
    parameter.

    Raises:
      Unserved: vmap can't follow the forward or the loss.
      AnswersDiffer: examples answer a question of the forward differently.
    """
    count = count_of(inputs)
    size = sum(slot.shape.numel() for slot in objective.slots.values())
    if DERIVING in questions.needs and count * size > _COPIED_FLOATS:
        raise Unserved("a gradient within the forward, of a model that is too large for copies")
    alone = Alone(objective.slots, count, objective.modules, rules=RULES, questions=questions)
    alone.draws = replace(draws, calls=0)
    if objective.of_units:
        alone.size = int(next(part.shape[1] for part in batches_in(inputs)))
    with objective.put_back():
        outputs, losses = _forward(objective, alone, inputs, targets)
    alone.check()
    if losses is None:
        source = outputs
    else:
        source = losses
    if not alone.uses or not source.requires_grad:
        return []
    uses = alone.uses[::-1]
    alone.uses.clear()
    edges = [edge for edge, _ in uses]
    try:
        with objective.put_back_own():
            gradients = list(_output_gradients(objective, outputs, losses, targets, edges))
    except RuntimeError as error:
        raise Unserved(_reason(error)) from error
    held = list[Term]()
    while uses:  # frees what no term holds
        grads = gradients.pop()
        of_use = uses.pop()[1]
        if grads is not None:
            held += of_use(grads if grads.dtype == objective.dtype else grads.to(objective.dtype))
        del grads, of_use
    return _of_parameters(held, alone.computed.all, objective.order)


def _of_parameters(held: list[Term], weights: list[Computed], order: int) -> list[Term]:
    """The terms of a pass combined, those of computed weights as terms of parameters. Where a
    parameter appears in others too, and where they are small, they are built."""
    terms: list[Any] = combined_terms(held, order)
    if not weights:
        return joined(terms)
    others = list[Term]()
    found = list[TakenBack]()
    for term in terms:
        parts = _apart(term) if any(slot.index < 0 for slot in slots_of(term)) else [term]
        for part in parts:
            if slots_of(part)[0].index < 0:
                found.append(TakenBack(weights[-1 - part.slot.index], part))
            else:
                others.append(part)
    uses = Counter(slot.index for term in others for slot in slots_of(term))
    uses.update(index for each in found for index in each.weight.of)
    large = list[TakenBack]()
    try:
        for each in found:
            if each.is_small or any(uses[index] > 1 for index in each.weight.of):
                others += each.rows()
            else:
                each.check()
                large.append(each)
    except RuntimeError as error:
        raise Needs(COPYING, _reason(error)) from error
    return [*joined(combined_terms(others, order)), *large]


def _forward(
    objective: Objective, alone: Alone, inputs: Tree, targets: Tree
) -> tuple[Any, Tensor | None]:
    """The outputs (n, ...) of a pass, and the losses (n,), or None if the loss is one of this
    package, which reads only its own row."""
    keeps = False

    def single(example: Tree, target: Tree) -> Tensor:
        nonlocal keeps
        if objective.of_units:
            return objective.unit_loss(example, target)
        outputs = objective.outputs(example)
        rows = isinstance(outputs, Tensor) and outputs.shape[:1] == (1,)
        keeps = is_of_package(objective.loss) and rows
        if keeps:
            return outputs  # type: ignore[no-any-return]
        with objective.casting():
            return one_each(objective.loss(outputs, target), 1)

    given = [detached(inputs), targets]
    if not objective.of_units:
        given = [as_batches_of_one(tree) for tree in given]
    found = side_by_side(alone, single, *given)
    with torch.enable_grad():
        rows = found.squeeze(1)
    if keeps:
        return (rows, None)
    return (None, rows)


def side_by_side(alone: Alone, single: Any, *trees: Tree) -> Any:
    """The results of a function for each row of the trees, (n, ...), alone, under vmap.

    Raises:
      Unserved: vmap can't follow it; the message has the reason.
      AnswersDiffer: examples answer one of its questions differently.
    """
    tensors = batches_in(trees)
    if not all(isinstance(part, Tensor) for part in tensors):
        raise Unserved("graphs have different sizes")

    def entered(*values: Tensor) -> Any:
        waiting = iter(values)
        with seen(), alone:
            return single(*(mapped(lambda _: next(waiting), tree) for tree in trees))

    with torch.enable_grad(), warnings.catch_warnings():
        # PyTorch warns that an operation without a batching rule is slower.
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        try:
            return vmap(entered, randomness="different")(*tensors)
        except ValueError as error:
            if not _is_of_vmap(error):
                raise
            raise Unserved(_reason(error)) from error
        except CONFUSED as error:
            raise Unserved(_reason(error)) from error


def as_batches_of_one(tree: Tree) -> Tree:
    """Examples (n, ...) as n batches of one, (n, 1, ...)."""
    return mapped(
        lambda values: values.unsqueeze(1) if isinstance(values, Tensor) else values, tree
    )


def _is_of_vmap(error: ValueError) -> bool:
    return "functorch" in extract_tb(error.__traceback__)[-1].filename


def _reason(error: Exception) -> str:
    first = str(error).strip().split("\n")[0].split(". ")[0][:120]
    if "TorchScript" in first:
        first = SCRIPTED
    return f"{first}{place_of_error(error)}"


def _output_gradients(
    objective: Objective,
    outputs: Any,
    losses: Tensor | None,
    targets: Tree,
    edges: Sequence[GradientEdge],
) -> Sequence[Tensor | None]:
    """The gradient of LOSS_SCALE times the loss at the outputs of each use."""
    if losses is None and objective.has_known_gradient(targets) and outputs.dim() == 2:
        return torch.autograd.grad(
            outputs, edges, logit_gradients(outputs, targets), allow_unused=True
        )
    if losses is None:
        with torch.enable_grad():
            losses = objective.losses(outputs, targets)
    return torch.autograd.grad(
        losses, edges, torch.full_like(losses, LOSS_SCALE), allow_unused=True
    )


def combined_terms(terms: list[Term], order: int) -> list[Term]:
    """Terms merged to one for each parameter: a parameter that is used several times has one
    gradient. The list is emptied, so that memory of merged terms is freed."""
    uses = defaultdict[int, int](int)
    for term in terms:
        for slot in slots_of(term):
            uses[slot.index] += 1
    found: list[Term] = []
    shared = defaultdict[int, list[Any]](list)
    while terms:
        last = terms.pop()
        if all(uses[slot.index] == 1 for slot in slots_of(last)):
            found.append(_cheapest(last, order))
        else:
            for part in _apart(last):
                shared[part.slot.index].append(part)
        del last
    while shared:
        found.append(_one(shared.popitem()[1], order))
    return found[::-1]


def slots_of(term: Any) -> list[Slot]:
    """The slots of a term's parameters."""
    if isinstance(term, Pair):
        slots = [term.weight, term.bias]
    else:
        slots = [term.slot]
    return [slot for slot in slots if slot is not None]


def _apart(term: Any) -> list[Any]:
    """A term, split into terms of one parameter each, and of one kind."""
    if isinstance(term, Tied):
        return [term.lookup, term.outer]
    if not isinstance(term, Pair):
        return [term]
    found = list[Any]()
    if term.weight is not None:
        found.append(Outer(term.weight, term.inputs.unsqueeze(1), term.grads.unsqueeze(1)))
    if term.bias is not None:
        found.append(Rows(term.bias, term.grads))
    return found


def _joined(parts: list[Any]) -> Any:
    """The sum of several terms of one kind and one parameter: their positions are concatenated."""
    if len(parts) == 1:
        return parts[0]
    places = ("ids" if type(parts[0]) is Lookup else "inputs", "grads")
    return replace(
        parts[0], **{name: torch.cat([getattr(part, name) for part in parts], 1) for name in places}
    )


def _is_convolved(term: object) -> bool:
    """True for a term of a convolution, whose file only its models load."""
    return hasattr(term, "geometry")


def _cheapest(term: Any, order: int) -> Term:
    """A term, or its built gradients if they are cheaper for norms of this order."""
    if type(term) is Outer or _is_convolved(term):
        return term.cheapest(order)  # type: ignore[no-any-return]
    return term  # type: ignore[no-any-return]


def _one(parts: list[Any], order: int) -> Term:
    """The sum of several terms of one parameter."""
    if all(map(_is_convolved, parts)) and len({part.call for part in parts}) == 1:
        return _cheapest(_joined(parts), order)
    parts = [part.outer() if _is_convolved(part) else part for part in parts]
    kinds = ([part for part in parts if type(part) is kind] for kind in (Outer, Lookup))
    joined = [_joined(some) for some in kinds if some]
    rest = [part for part in parts if type(part) is Rows]
    if not rest and len(joined) == 2 and order == 2:
        return Tied(lookup=joined[1], outer=joined[0])
    if not rest and len(joined) == 1:
        return _cheapest(joined[0], order)
    rest += [part.built() for part in joined]
    slot = parts[0].slot
    if len({part.slot for part in rest}) > 1:
        rest = [Rows(slot, part.slot.plain(part.values)) for part in rest]
        slot = replace(slot, kernel_last=False)
    return Rows(
        slot, reduce(Tensor.add, (part.values.reshape(rest[0].values.shape) for part in rest))
    )
