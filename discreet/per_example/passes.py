"""Passes that give the terms of per-example gradients, and their trial on made-up examples.

A forward may ask for one answer of all examples, such as `mask.all()`. Examples that answer differently are run apart
(`branches.py`). But if made-up examples that answer differently have the same gradients with the answer that such a
batch gives, that answer is given for every batch: the question chooses among ways to compute the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from discreet.per_example.any_model import plain_gradient
from discreet.per_example.branches import Question, Split
from discreet.per_example.combined import combined
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
from discreet.per_example.terms import Parts, Tape, Term, Use
from discreet.per_example.trial import (
    AGREEMENT,
    COARSE_AGREEMENT,
    CONFUSED,
    Undrawn,
    goes_alone,
    made_up,
    same_chance,
)
from discreet.per_example.watch import Watch

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
    tape = Tape(objective.slots, count_of(inputs), objective.order)
    watch = Watch(tape, objective.modules, counts=counts)
    watch.settled = settled
    try:
        outputs, losses = _watched(objective, watch, inputs, targets)
    except (Unserved, MixesExamples) as first:
        if not watch.counted:
            raise
        try:
            return one_pass(objective, inputs, targets, settled, counts=False)
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


def tried(model: nn.Module, inputs: Tree) -> tuple[str, Questions]:
    """Tries a model on made-up examples: the reason why it can't be watched, "" if what is found is what plain autograd
    finds for each of them alone; and its questions. Nothing is drawn at random: dropout keeps everything.

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
