"""A trial of a model on made-up examples: several together, each alone, and side by side
(`passes.py`) must agree.

If several together give other outputs than each alone, the forward mixes examples. Run on each
example alone it would be private, but not what its author meant, so it is refused, and the message
names the call. If a gradient found side by side differs from that of plain autograd, because of a
wrong rule, examples run one after the other.

No example of the batch decides this: otherwise an example could change how the gradients of others
are computed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from discreet.layers.branches import AnswersDiffer, Question, Questions
from discreet.layers.draws import no_draws
from discreet.layers.functions import function_of
from discreet.layers.model_state import tensors_of
from discreet.layers.refusals import CONFUSED, SCRIPTED, MixesExamples, Unserved, place
from discreet.per_example.any_model import OfMany, gradient_of, plain_loss
from discreet.per_example.attributes import numbers_of
from discreet.per_example.gradient_hooks import gradient_hooks
from discreet.per_example.objective import (
    Objective,
    Tree,
    count_of,
    detached,
    filled,
    objective_of,
    rows_of,
    with_floats,
)
from discreet.per_example.passes import FEWEST, GradientsOfSome, needed_pass, passes
from discreet.per_example.trial import (
    ROWS,
    UNREPEATED,
    Trial,
    Undrawn,
    agreement,
    differ,
    floats_in,
    same_chance,
)

# A made-up example may lie at a kink of a ReLU or a maximum, where rounding decides. A wrong rule
# is wrong for all.
_TRIALS = 3
_SETTLED = 1e-7  # the largest difference of gradients in float64 if a question is settled
_STIRRED = 7717


class _EachRow:
    """A loss in which every number of an example's outputs has another weight. Outputs that at the
    first call have no row for each example, such as a mean, do not count."""

    __module__ = "discreet.per_example.agreement"

    def __init__(self) -> None:
        self.found: list[tuple[int, int]] | None = None

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor:
        values = floats_in(outputs)
        count = len(targets)
        if self.found is None:
            shapes = (list(map(int, value.shape)) for value in values)
            self.found = [
                (place, sizes.index(count)) for place, sizes in enumerate(shapes) if count in sizes
            ]
        if not self.found:
            raise Unserved("no tensor of its outputs has a row for each example")
        parts = [values[place].movedim(dim, 0).reshape(count, -1) for place, dim in self.found]
        rows = torch.cat(parts, 1)
        return rows @ torch.linspace(-1, 2, rows.shape[1], dtype=rows.dtype, device=rows.device)


def tried(trial: Trial) -> tuple[str, Questions]:
    """The reason why the examples of a model can't run side by side, or ""; and the model's
    questions. Nothing is drawn at random: dropout keeps everything.

    Raises:
      MixesExamples: the forward mixes examples.
    """
    objective = objective_of(trial.objective.model, _EachRow())
    reason = ""
    kind = 0  # whole numbers may also be lengths, which are above 0, or a mask
    questions = Questions()
    for seed in range(_TRIALS):
        try:
            examples = trial.examples(seed, kind=kind)
            # Such as that a deviation of one example has no degree of freedom.
            with same_chance(trial.device), warnings.catch_warnings(action="ignore"):
                reason = _reason(objective, examples, questions)
                if not reason:
                    trials = _trials_of(objective, trial, examples, questions)
                    questions = _settled(objective, trials, questions)
        except MixesExamples:
            raise
        except (Unserved, *CONFUSED) as error:
            reason = str(error)
            kind += 1
        if not reason:
            break
    questions.numbers[:] = numbers_of(objective.modules)
    return reason, questions


def _reason(objective: Objective, examples: Tree, questions: Questions) -> str:
    """A message if a gradient differs from that of plain autograd, else "". If it differs in the
    model's own type, float64 decides.

    Raises:
      MixesExamples: the outputs of examples together are not those of each alone.
    """
    together = _together(objective, examples)
    alone = list[Tensor]()
    refused: Exception | None = None
    unseen = _unseen(objective)
    reason = ""
    if not unseen:
        try:
            reason = _tried_on(objective, examples, questions, None, alone)
        except (Unserved, *CONFUSED) as error:
            refused = error
    if together is not None:
        rest = (rows_of(examples, slice(at, at + 1)) for at in range(len(alone), ROWS))
        alone += [_valued(objective, one) for one in rest]
        if _mixed(objective, examples, together, torch.cat(alone)):
            raise MixesExamples(_first_difference(objective, examples))
    if refused is not None:
        raise refused
    if not reason or objective.parameters[0].dtype == torch.float64:
        return unseen or reason
    with in_float64(objective.model):
        wide = objective_of(objective.model, objective.loss)
        try:
            return _tried_on(wide, with_floats(Tensor.double, examples), questions)
        except (Unserved, *CONFUSED):
            return reason


def _together(objective: Objective, examples: Tree) -> Tensor | None:
    """The values of several examples, run together. None if only one alone runs, for example as
    the lengths of a batch must be sorted: nothing is known then."""
    loss: Any = objective.loss
    loss.found = None
    try:
        return _valued(objective, examples)
    except CONFUSED:
        loss.found = None
        _valued(objective, rows_of(examples, slice(0, 1)))
        return None


def _mixed(objective: Objective, examples: Tree, together: Tensor, alone: Tensor) -> bool:
    """True if the values of examples together differ from those of each alone. If examples answer
    the forward's questions differently, those are asked that answer alike."""
    if not differ(together, alone, agreement(objective)):
        return False
    groups = _groups(objective, examples, len(alone))
    if len(groups) > 1:
        parts = [(rows_of(examples, group), alone[group]) for group in groups]
        return any(
            _mixed(objective, some, _valued(objective, some), values) for some, values in parts
        )
    if differ(_valued(objective, examples), _valued(objective, examples)):
        raise ValueError(UNREPEATED)
    return True


def _valued(objective: Objective, examples: Tree) -> Tensor:
    count = count_of(examples)
    # With gradients, as the forward may take some itself.
    with torch.enable_grad(), objective.put_back(), Undrawn(), OfMany(count):
        outputs = objective.outputs(detached(examples))
        return objective.loss(outputs, objective.zeros(count)).detach()


def _groups(objective: Objective, examples: Tree, count: int) -> list[Tensor]:
    """The indices of the examples, grouped by equal answers."""
    rows = max(count, FEWEST)
    some = filled(examples, rows)
    try:
        with Undrawn():
            needed_pass(objective, some, objective.zeros(rows), Questions(), no_draws(rows))
    except AnswersDiffer as split:
        return split.groups(count)
    except Unserved:
        pass
    return []


def _unseen(objective: Objective) -> str:
    """A message if a pass over several examples would not see what the model does, else ""."""
    for name, part in objective.model.named_modules():
        learns = any(value.requires_grad for value in part.parameters())
        if learns and isinstance(part, torch.jit.ScriptModule):
            return f"{name or 'it'} is {SCRIPTED}"
    return gradient_hooks(objective.modules, objective.trainable())


@contextmanager
def in_float64(model: nn.Module) -> Iterator[None]:
    """A context in which the parameters and buffers of a model are float64, also under autocast,
    which does not change that type, and where the forward asks for float32. They are others: a
    tensor whose type changes loses the graphs that it is part of."""
    wide = {
        id(value): _wide_like(value)
        for value in tensors_of(model).values()
        if value.is_floating_point()
    }
    holders = ((part._parameters, part._buffers, vars(part)) for part in model.modules())
    before = [(holder, dict(holder)) for group in holders for holder in group]
    try:
        for holder, values in before:
            holder.update((name, _replaced(wide, value)) for name, value in values.items())
        with _Wide():
            yield
    finally:
        for holder, values in before:
            holder.update(values)


def _replaced(wide: dict[int, Tensor], value: Any) -> Any:
    if type(value) is list:
        return [wide.get(id(each), each) for each in value]
    return wide.get(id(value), value)


def _wide_like(value: Tensor) -> Tensor:
    copy = value.detach().to(torch.float64, copy=True)
    return nn.Parameter(copy, value.requires_grad) if isinstance(value, nn.Parameter) else copy


def _trials_of(
    objective: Objective, trial: Trial, examples: Tree, questions: Questions
) -> list[Tree]:
    """The examples, and, as whole numbers may also be a mask, the same examples with 0 and 1 in
    place of those of each tensor, if the model can follow them; adds the questions that these
    answer differently. None of them if nothing is asked."""
    leaves, spec = tree_flatten(examples)
    masks = tree_leaves(trial.examples(kind=2))
    masked = [
        tree_unflatten([*leaves[:at], masks[at], *leaves[at + 1 :]], spec)
        for at, value in enumerate(leaves)
        if value is not None and not value.is_floating_point() and not value.is_complex()
        if (value >= 2).any()
    ]
    if not questions.asked and not any(_asked(objective, some) for some in masked):
        return []
    found = [examples]
    for some in masked:
        more = Questions()
        with suppress(Unserved, *CONFUSED):
            if not _tried_on(objective, some, more):
                questions.asked.update(more.asked)
                found.append(some)
    if questions.asked:
        found += _spread(objective, examples)
    return found


def _asked(objective: Objective, examples: Tree) -> set[Question]:
    """The questions that examples answer differently."""
    questions = Questions()
    with suppress(Unserved, *CONFUSED), Undrawn():
        list(passes(objective, examples, objective.zeros(ROWS), questions, no_draws(ROWS)))
    return {*questions.asked}


def _spread(objective: Objective, examples: Tree) -> list[Tree]:
    """The examples with floats between -10 and 10 in place of those between 0 and 1, if there are
    any and the model can follow them."""
    if not floats_in(examples):
        return []
    wide = with_floats(lambda value: 20 * (value - 0.5), examples)
    with suppress(Unserved, *CONFUSED):
        if not _tried_on(objective, wide, Questions()):
            return [wide]
    return []


class _Wide(TorchFunctionMode):
    """A context in which whatever would become float32 becomes float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = {key: _wide(value) for key, value in (kwargs or {}).items()}
        result = _wide(func)(*map(_wide, args), **named)
        is_new = isinstance(result, Tensor) and not isinstance(next(iter(args), None), Tensor)
        return result.double() if is_new and result.dtype == torch.float32 else result


def _wide(value: Any) -> Any:
    if value is torch.float32:
        return torch.float64
    if value is Tensor.float:
        return Tensor.double
    return value


def _settled(objective: Objective, trials: list[Tree], questions: Questions) -> Questions:
    """Settles each asked question with one answer for every batch, if that does not change the
    gradients of any of the made-up examples. In float64, as otherwise rounding would hide a small
    change, such as that of one more step towards a fixed point; and with other parameters, as those
    of a new model may be zeros, which would hide a change too. If the examples answer alike with
    these, they tell nothing."""
    if not questions.asked:
        return questions
    draws = torch.Generator().manual_seed(_STIRRED)
    with in_float64(objective.model), suppress(Unserved, *CONFUSED):
        wide = objective_of(objective.model, objective.loss)
        for value in wide.parameters:
            value.data += 0.1 * torch.randn(value.shape, generator=draws).to(value)
        doubles = [with_floats(Tensor.double, examples) for examples in trials]
        asked = set().union(*(_asked(wide, examples) for examples in doubles))
        known = {each: None for each in questions.asked if each in asked}
        return _settled_by(wide, doubles, replace(questions, asked=known))
    return Questions(needs=questions.needs)


def _settled_by(objective: Objective, trials: list[Tree], questions: Questions) -> Questions:
    while questions.asked:
        question = next(iter(questions.asked))
        found = None
        for answer in (False, True):
            more = Questions(settled={**questions.settled, question: answer})
            try:
                if not any(_tried_on(objective, examples, more, _SETTLED) for examples in trials):
                    found = more
                    break
            except (Unserved, *CONFUSED):
                continue
        if found is None:
            rest = dict(list(questions.asked.items())[1:])
            questions = Questions(rest, questions.settled)
        else:
            found.asked.pop(question, None)
            questions = found
    return questions


def _tried_on(
    objective: Objective,
    examples: Tree,
    questions: Questions,
    part: float | None = None,
    values: list[Tensor] | None = None,
) -> str:
    """A message if the gradient of an example differs from that of plain autograd, else "".
    `values` gets the value of each example, alone."""
    targets = objective.zeros(ROWS)
    with Undrawn():
        found = list(passes(objective, examples, targets, questions, no_draws(ROWS)))
    for at in range(ROWS):
        one = slice(at, at + 1)
        some = rows_of(examples, one)
        with objective.put_back(), Undrawn():
            loss = plain_loss(objective, some, targets[one])
            if values is not None:
                values.append(loss.detach())
            alone = gradient_of(objective, loss)
        if _are_apart(_row(objective, found, at), alone, part, agreement(objective)):
            return "a made-up example alone has different gradients"
    return ""


def _are_apart(one: Tensor, alone: list[Tensor], part: float | None, share: float) -> bool:
    """True if two gradients of an example differ at a parameter by more than a share of the largest
    norm of one. NaN, such as from a mean over a made-up length of 0, tells nothing of a rule; but
    one must not be NaN alone: a type may be too narrow for the scale of the loss."""
    sizes = [value.numel() for value in alone]
    other = torch.cat([value.flatten() for value in alone]).to(one.dtype)
    known = other
    apart = _norms(one - other, sizes)
    if not apart.isfinite().all():
        known = other.nan_to_num()
        if part is None:
            lost = one.isnan() & other.isfinite()
        else:
            lost = one.isnan() != other.isnan()
            one = one.nan_to_num()
            other = known
        apart = _norms((one - other).masked_fill_(lost, math.inf), sizes)
    return bool((apart > _norms(known, sizes).max() * (part or share)).any())


def _norms(values: Tensor, sizes: list[int]) -> Tensor:
    return torch.stack(torch._foreach_norm(torch.split_with_sizes(values, sizes)))


def _row(objective: Objective, parts: list[GradientsOfSome], at: int) -> Tensor:
    """The gradient of an example, flat."""
    found = objective.parts()
    for part in parts:
        places = range(ROWS) if part.places is None else part.places.tolist()
        if at in places:
            chosen = objective.zeros(part.rows)
            chosen[places.index(at)] = 1
            for term in part.terms:
                term.add_to(found, chosen)
    return found.total()


class _Calls(TorchFunctionMode):
    """Records the floats that each function of PyTorch returns, and where it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = list[tuple[str, str, list[Tensor]]]()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        function = function_of(func)
        result = func(*args, **(kwargs or {}))
        floats = [value.detach().clone() for value in floats_in(result)]
        if floats and not function.is_fact:
            self.seen.append((function.name, place(), floats))
        return result


@torch.enable_grad()
def _first_difference(objective: Objective, examples: Tree) -> str:
    """The first call whose results for several examples differ from those of each alone."""
    every = list[list[tuple[str, str, list[Tensor]]]]()
    for some in (slice(None), *(slice(at, at + 1) for at in range(ROWS))):
        given = rows_of(examples, some)
        many = OfMany(count_of(given))
        with objective.put_back(), Undrawn(), many, _Calls() as calls:
            objective.outputs(detached(given))
        every.append(calls.seen)
    for (name, where, together), *others in zip(*every, strict=False):
        if any((other[0], other[1]) != (name, where) for other in others):
            return f"it branches differently for one example than for several, before {name}{where}"
        alone = zip(*(other[2] for other in others), strict=True)
        if not all(_follows(one, list(parts)) for one, parts in zip(together, alone, strict=True)):
            return f"{name} works across the examples{where}"
    return "its outputs for several examples differ from those of each alone"


def _follows(together: Tensor, alone: list[Tensor]) -> bool:
    """True if a result consists of those of each alone, along some dimension, or is the same for
    all."""
    if together.shape == alone[0].shape:
        return not any(differ(together, one) for one in alone)
    for dim in range(together.dim()):
        with suppress(RuntimeError, IndexError):  # other shapes
            joined = torch.cat(alone, dim)
            if joined.shape == together.shape and not differ(together, joined):
                return True
    return False
