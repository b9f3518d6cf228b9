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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from discreet.layers.branches import AnswersDiffer, Questions
from discreet.layers.draws import no_draws
from discreet.layers.functions import function_of
from discreet.layers.model_state import tensors_of
from discreet.layers.refusals import CONFUSED, SCRIPTED, MixesExamples, Unserved, place
from discreet.layers.terms import Parts
from discreet.per_example.any_model import OfMany, plain_gradient
from discreet.per_example.attributes import numbers_of, put_back
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
    AGREEMENT,
    COARSE_AGREEMENT,
    ROWS,
    UNREPEATED,
    Undrawn,
    differ,
    floats_in,
    made_up,
    same_chance,
)

# A made-up example may lie at a kink of a ReLU or a maximum, where rounding decides. A wrong rule
# is wrong for all.
_TRIALS = 3
_SETTLED = 1e-7  # the largest difference of gradients in float64 if a question is settled
_STIRRED = 7717


class _EachRow:
    """A loss in which every number of an example's outputs has another weight. Outputs without a
    row for each example, such as a mean, do not count."""

    __module__ = "discreet.per_example.agreement"

    def __init__(self) -> None:
        self.found: list[tuple[int, int]] = []

    def of(self, outputs: Any, count: int = ROWS) -> None:
        """Finds the outputs that have a row for each of `count` examples."""
        shapes = (list(map(int, value.shape)) for value in floats_in(outputs))
        self.found = [
            (place, sizes.index(count)) for place, sizes in enumerate(shapes) if count in sizes
        ]

    def __call__(self, outputs: Any, targets: Tensor) -> Tensor:
        if not self.found:
            raise Unserved("no tensor of its outputs has a row for each example")
        values = floats_in(outputs)
        count = len(targets)
        parts = [values[place].movedim(dim, 0).reshape(count, -1) for place, dim in self.found]
        rows = torch.cat(parts, 1)
        return rows @ torch.linspace(-1, 2, rows.shape[1], dtype=rows.dtype, device=rows.device)


def tried(model: nn.Module, inputs: Tree) -> tuple[str, Questions]:
    """The reason why the examples of a model can't run side by side, or ""; and the model's
    questions. Nothing is drawn at random: dropout keeps everything.

    Raises:
      MixesExamples: the forward mixes examples.
    """
    loss = _EachRow()
    objective = objective_of(model, loss)
    reason = ""
    kind = 0  # whole numbers may also be lengths, which are above 0, or a mask
    questions = Questions()
    for seed in range(_TRIALS):
        try:
            examples = made_up(model, inputs, ROWS, seed, kind=kind)
            chance = same_chance(objective.parameters[0].device)
            with chance, Undrawn(), warnings.catch_warnings():
                # Such as that a deviation of one example has no degree of freedom.
                warnings.simplefilter("ignore")
                _check_alone(objective, loss, examples)
                reason = _reason(objective, examples, questions)
                if not reason:
                    trials = _trials_of(objective, inputs, examples, questions)
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


def _check_alone(objective: Objective, loss: _EachRow, examples: Tree) -> None:
    """Raises MixesExamples unless the outputs of examples together equal those of each alone. If
    examples answer the forward's questions differently, this is checked for those that answer
    alike."""
    with torch.enable_grad(), put_back(objective.kept):
        try:
            loss.of(objective.outputs(detached(examples)))
        # For example a batch whose lengths must be sorted. If each alone runs, nothing is known.
        except CONFUSED:
            loss.of(objective.outputs(rows_of(examples, slice(0, 1))), 1)
            return
    # What several left is gone: alone must not read it.
    ones = (rows_of(examples, slice(at, at + 1)) for at in range(ROWS))
    alone = torch.cat([_valued(objective, one, 1) for one in ones])
    waiting = [torch.arange(ROWS)]
    while waiting:
        places = waiting.pop()
        some = rows_of(examples, places)
        if not differ(_valued(objective, some, len(places)), alone[places], _agreement(objective)):
            continue
        groups = _groups(objective, some, len(places))
        if len(groups) < 2:
            if differ(_valued(objective, some, len(places)), _valued(objective, some, len(places))):
                raise ValueError(UNREPEATED)
            raise MixesExamples(_first_difference(objective, examples))
        waiting += [places[group] for group in groups]


def _valued(objective: Objective, examples: Tree, count: int) -> Tensor:
    # With gradients, as the forward may take some itself.
    with (
        torch.enable_grad(),
        put_back(objective.kept),
        OfMany(count),
    ):
        outputs = objective.outputs(detached(examples))
        return objective.loss(outputs, objective.zeros(count)).detach()


def _groups(objective: Objective, examples: Tree, count: int) -> list[Tensor]:
    """The indices of the examples, grouped by equal answers."""
    try:
        rows = max(count, FEWEST)
        asked = Questions()
        some = filled(examples, rows)
        needed_pass(objective, some, objective.zeros(rows), asked, no_draws(rows))
    except AnswersDiffer as split:
        return split.groups(count)
    except Unserved:
        pass
    return []


def _agreement(objective: Objective) -> float:
    if objective.rounds:
        return COARSE_AGREEMENT
    return AGREEMENT


def _reason(objective: Objective, examples: Tree, questions: Questions) -> str:
    """A message if a gradient differs from that of plain autograd, else "". If it differs in the
    model's own type, float64 decides."""
    if unseen := _unseen(objective):
        return unseen
    reason = _tried_on(objective, examples, questions)
    if not reason or objective.parameters[0].dtype == torch.float64:
        return reason
    with in_float64(objective.model):
        wide = objective_of(objective.model, objective.loss)
        try:
            return _tried_on(wide, with_floats(Tensor.double, examples), questions)
        except (Unserved, *CONFUSED):
            return reason


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
    holders = [group for part in model.modules() for group in _holders(part)]
    before = [(holder, dict(holder)) for holder in holders]
    try:
        for holder, values in before:
            holder.update((name, _replaced(wide, value)) for name, value in values.items())
        with _Wide():
            yield
    finally:
        for holder, values in before:
            holder.update(values)


def _holders(module: nn.Module) -> list[dict[str, Any]]:
    """The dictionaries in which a module holds parameters and buffers, and lists of them."""
    lists = {name for name, value in vars(module).items() if type(value) is list}
    return [module._parameters, module._buffers, *([module.__dict__] if lists else [])]


def _replaced(wide: dict[int, Tensor], value: Any) -> Any:
    if type(value) is list:
        return [wide.get(id(each), each) for each in value]
    return wide.get(id(value), value)


def _wide_like(value: Tensor) -> Tensor:
    if isinstance(value, nn.Parameter):
        return nn.Parameter(value.detach().double(), value.requires_grad)
    return value.detach().double()


def _trials_of(
    objective: Objective, inputs: Tree, examples: Tree, questions: Questions
) -> list[Tree]:
    """The examples, and, as whole numbers may also be a mask, the same examples with 0 and 1 in
    place of those of each tensor, if the model can follow them; adds the questions that these
    answer differently."""
    found = [examples]
    leaves, spec = tree_flatten(examples)
    masks = tree_leaves(made_up(objective.model, inputs, ROWS, kind=2))
    for at, value in enumerate(leaves):
        if value is None or value.is_floating_point() or value.is_complex():
            continue
        if not (value >= 2).any():
            continue
        masked = tree_unflatten([*leaves[:at], masks[at], *leaves[at + 1 :]], spec)
        more = Questions()
        with suppress(Unserved, *CONFUSED):
            if not _tried_on(objective, masked, more):
                questions.asked.update(more.asked)
                found.append(masked)
    if questions.asked:
        found += _spread(objective, examples)
    return found


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
        return _wide(func)(*map(_wide, args), **named)


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
    of a new model may be zeros, which would hide a change too."""
    if not questions.asked:
        return questions
    draws = torch.Generator().manual_seed(_STIRRED)
    with in_float64(objective.model), suppress(Unserved, *CONFUSED):
        wide = objective_of(objective.model, objective.loss)
        for value in wide.parameters:
            value.data += 0.1 * torch.randn(value.shape, generator=draws).to(value)
        doubles = [with_floats(Tensor.double, examples) for examples in trials]
        _tried_on(wide, doubles[0], Questions())
        return _settled_by(wide, doubles, questions)
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
    objective: Objective, examples: Tree, questions: Questions, part: float | None = None
) -> str:
    targets = objective.zeros(ROWS)
    found = _rows(objective, passes(objective, examples, targets, questions, no_draws(ROWS)))
    share = part or _agreement(objective)
    for at in range(ROWS):
        one = slice(at, at + 1)
        with put_back(objective.kept):
            alone = plain_gradient(objective, rows_of(examples, one), targets[one])
        margin = max(float(value.nan_to_num().norm()) for value in alone) * share
        pairs = zip(objective.slots.values(), alone, strict=True)
        if any(_apart(found[at][slot.index], value, part) > margin for slot, value in pairs):
            return "a made-up example alone has different gradients"
    return ""


def _apart(one: Tensor, other: Tensor, part: float | None) -> float:
    """The distance of two gradients. NaN, such as from a mean over a made-up length of 0, tells
    nothing of a rule; but one must not be NaN or infinite alone: a type may be too narrow for the
    scale of the loss."""
    if part is None and bool(other.isfinite().all()):
        return float((one - other).norm().nan_to_num(math.inf))
    if part is None:
        return float((one - other).norm())
    if not torch.equal(one.isnan(), other.isnan()):
        return math.inf
    return float((one.nan_to_num() - other.nan_to_num()).norm())


def _rows(objective: Objective, parts: Iterable[GradientsOfSome]) -> list[Parts]:
    """The gradient of each example."""
    found = [objective.parts() for _ in range(ROWS)]
    for part in parts:
        for row, at in enumerate(range(ROWS) if part.places is None else part.places.tolist()):
            chosen = objective.zeros(part.rows)
            chosen[row] = 1
            for term in part.terms:
                term.add_to(found[at], chosen)
    return found


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
        with put_back(objective.kept), OfMany(count_of(given)), _Calls() as calls:
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
