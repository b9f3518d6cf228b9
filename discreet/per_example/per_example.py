"""Clipped sums of per-example gradients, the quantity that DP-SGD releases with noise.

Each example goes through the model and its loss alone, as a batch of one, under `torch.func.vmap`
(`alone.py`): so nothing can mix examples. Functions that read parameters run for all examples at
once below it, and note terms from which the norms of all per-example gradients follow by inputs and
output gradients, without building the gradients (`terms.py` has the formulas and their sources).
One backward pass then gives the norms, and one matrix product for each parameter the clipped sum. A
model that vmap can't follow runs one example after the other (`any_model.py`), and the log
"discreet" says so once, with the line that is the reason. A forward that mixes examples is refused
(`agreement.py`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from discreet.layers.branches import Questions
from discreet.layers.draws import Draws, own_draws
from discreet.layers.refusals import Unserved
from discreet.layers.terms import Term, floats_at_once, total_mass, without
from discreet.per_example.agreement import tried
from discreet.per_example.any_model import built_terms
from discreet.per_example.attributes import numbers_of
from discreet.per_example.gradient_hooks import gradient_hooks
from discreet.per_example.objective import (
    LOSS_SCALE,
    Loss,
    Objective,
    Tree,
    as_tree,
    batches_in,
    check_tensors,
    count_of,
    cross_entropy,
    filled,
    is_of_package,
    objective_of,
    rows_of,
)
from discreet.per_example.own_code import has_own_code, memory_for
from discreet.per_example.passes import FEWEST, GradientsOfSome, passes
from discreet.per_example.perceptron import by_hand
from discreet.per_example.trial import Trial, check_forward, exact_products, unmoved
from discreet.privacy.clipping import check_clip, clip_factors

_UNSCALE = torch.tensor(1 / LOSS_SCALE)
# Floats of gradients that are built at once, if they must be built: 256 MB of float32.
_BUILT_FLOATS = 2**26
_FEW = 4  # with fewer examples, one of them might decide if a step is an error
_MOST_CHANGES = 3  # of a model's numbers: one that counts its steps is not tried at each


@dataclass
class _Tried:
    """A model's last trial on made-up examples.

    Attributes:
      state: of the model at the trial.
      reason: why examples can't run side by side, or "".
      losses: those with which the model was tried.
      changes: how often the numbers have changed on which answers depend.
    """

    state: object
    reason: str
    questions: Questions
    losses: list[ref[Loss]]
    changes: int = 0


class Found(NamedTuple):
    """What is known of a model for a sum: the reason why examples can't run side by side, or "",
    its questions, and the draws of the examples."""

    reason: str
    questions: Questions
    draws: Draws


_trials: WeakKeyDictionary[nn.Module, _Tried] = WeakKeyDictionary()
_undone = set[str]()
_log = logging.getLogger("discreet")


def clipped_gradient_sum(
    model: nn.Module,
    inputs: Tree,
    *,
    targets: Tree = None,
    clip_norm: float,
    loss: Loss = cross_entropy,
) -> tuple[Tensor, Tensor]:
    """The sum of per-example gradients, each clipped to an L2 norm, and the norms before clipping.

    Let g_i be the gradient of example i's loss and C = clip_norm. Then total = sum_i g_i min(1, C /
    ||g_i||) (Abadi et al. 2016, Algorithm 1, without the noise). The sums for parts of a batch add
    up to the sum for the batch.

    Args:
      model: float32, float64 or bfloat16; called on whole batches. Its gradients, hooks and modes
        are not changed.
      inputs: (n, ...), of any type that the model takes; a tuple of tensors for its arguments, or a
        mapping or a dataclass for its arguments by name, each tensor with one row an example.
      targets: (n, ...), as the loss takes them; None: the loss gets the inputs.
      clip_norm: C, in the range of `check_clip`, in the gradient's units.
      loss: maps the model's outputs and targets to one value an example, (n,), that depends on that
        example alone.

    Returns:
      total, (num_params,), of the trainable parameters in the order of model.parameters(), tied
      ones once; float32 for bfloat16 parameters, and under torch.autocast, which applies only to
      the model and the loss. norms, (n,), no less than the true ones at any scale (beyond 1e-18). A
      gradient that is not finite, or whose squared norm overflows, counts as zero in the sum, and
      its norm is inf.

    Sensitivity: adding or removing one example changes total by at most C in L2 norm, up to the
    rounding of the float sum and of the other gradients, whose kernels may depend on n
    (`in_turn.py` avoids the latter). n = 0 gives zeros and no norms.

    Raises:
      ValueError: a setting out of range; a forward or a layer that mixes examples (BatchNorm in
        training mode); parameters of other types or on several devices; a loss that is not (n,).

    Dropout and other layers that draw are allowed. An example's numbers follow from a key, its
    identity and the number of the draw, so the bound holds for each key. The key comes from
    PyTorch's own generator, and an example's place in the batch stands for its identity: places
    shift if an example is missing, so the generator must be secret if the sum is released.
    Discreet's clients and DPSGD give a secret key, and DPSGD the identities (`drawn_from`).

    >>> x, y = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([0, 1])
    >>> total, norms = clipped_gradient_sum(nn.Linear(2, 2), x, targets=y, clip_norm=0.25)
    >>> total.shape, bool(total.norm() <= 0.5), bool((norms > 0).all())
    (torch.Size([6]), True, True)
    """
    check_clip(clip_norm, "clip_norm")
    return clipped_sum_of(objective_of(model, loss), inputs, targets, clip_norm)


def clipped_sum_by_owner(
    model: nn.Module,
    batch: tuple[Tree, Tree],
    owners: Tensor,
    *,
    clip_norm: float,
    loss: Loss = cross_entropy,
) -> tuple[Tensor, Tensor]:
    """As `clipped_gradient_sum`, but for owners: the gradient of the mean loss over an owner's rows
    is clipped.

    Args:
      batch: inputs and targets as in `clipped_gradient_sum`, with n rows; no graphs.
      owners: (n,), whole numbers: the owner of each row.

    Returns:
      total, (num_params,), and the norms of the owners in the order of their numbers. Adding or
      removing an owner with all its rows changes total by at most C.
    """
    check_clip(clip_norm, "clip_norm")
    objective = objective_of(model, loss)
    inputs, targets = trees_of(*batch)
    if not all(isinstance(part, Tensor) for part in batches_in((inputs, targets))):
        raise ValueError("owners: a graph is a unit by itself, and has no owner")
    if count_of(inputs, targets) != len(owners):
        raise ValueError(f"owners must be one for each row, {count_of(inputs)}, not {len(owners)}")
    unique: Any = torch.unique
    numbers, units, sizes = unique(owners, return_inverse=True, return_counts=True)
    if len(owners) == 0 or not objective.slots:
        return objective.parts().total(), objective.zeros(len(sizes))
    device = objective.parameters[0].device
    with (
        _explained(objective, inputs, targets),
        own_draws(len(sizes), device, numbers) as draws,
    ):
        found = Found(*_tried(objective, inputs, targets), draws)
        with unmoved(model), _remembering(objective) as own:
            own = replace(own, of_units=True)
            parts = _of_owners(own, (inputs, targets), (units, sizes), found)
            return _summed(objective, parts, clip_norm, len(sizes))


def _of_owners(
    objective: Objective,
    trees: tuple[Tree, Tree],
    of: tuple[Tensor, Tensor],
    found: Found,
) -> Iterator[GradientsOfSome]:
    """Passes for groups of owners with equal numbers of rows. `of`: the owner of each row, and the
    number of rows of each owner."""
    units, sizes = of
    order = units.argsort(stable=True)
    starts = sizes.cumsum(0) - sizes
    for size in sorted(set(sizes.tolist())):
        owners = (sizes == size).nonzero().squeeze(1)
        rows = order[starts[owners].unsqueeze(1) + torch.arange(size, device=order.device)]
        inputs, targets = (rows_of(tree, rows) for tree in trees)
        of_size = found._replace(draws=found.draws.of(owners))
        for part in _parts(objective, inputs, targets, of_size):
            yield part.within(owners)


def _parts(
    objective: Objective, inputs: Tree, targets: Tree, found: Found
) -> list[GradientsOfSome]:
    if not found.reason:
        try:
            return list(passes(objective, inputs, targets, found.questions, found.draws))
        except Unserved as error:
            found = found._replace(reason=str(error))
    return list(_built(objective, inputs, targets, found))


def l1_clipped_gradient_sum(
    model: nn.Module,
    inputs: Tree,
    *,
    targets: Tree = None,
    clip_norm: float,
    loss: Loss = cross_entropy,
) -> tuple[Tensor, Tensor]:
    """As `clipped_gradient_sum` with L1 norms: one example changes the sum by at most C in L1, for
    Laplace noise."""
    check_clip(clip_norm, "clip_norm")
    return clipped_sum_of(objective_of(model, loss, order=1), inputs, targets, clip_norm)


def check_finite(count: int, finite: int) -> None:
    """Raises ValueError if no gradient of a step of `count` examples is finite: the step would be
    noise alone.

    A single example never decides this: at least three others have no finite gradient either.
    """
    if count >= _FEW and not finite:
        raise ValueError(
            f"none of the {count} gradients of this step is finite: the parameters are not, or "
            "the loss divides by something that is zero for one example alone, such as a "
            "deviation over the batch"
        )


def trees_of(inputs: Any, targets: Any) -> tuple[Tree, Tree]:
    """Inputs and targets as trees of tensors; without targets the loss gets the inputs."""
    tree = as_tree(inputs)
    wanted = tree if targets is None else as_tree(targets)
    check_tensors(tree, wanted)
    return tree, wanted


def clipped_sum_of(
    objective: Objective, inputs: Any, targets: Any, clip: float, of_one: Draws | None = None
) -> tuple[Tensor, Tensor]:
    """`clipped_gradient_sum` of an objective; `of_one`: the draws of these examples."""
    inputs, targets = trees_of(inputs, targets)
    count = count_of(inputs, targets)
    if count == 0 or not objective.slots:
        return objective.parts().total(), objective.zeros(count)
    with _explained(objective, inputs, targets):
        if (part := by_hand(objective, inputs, targets)) is not None:
            return _summed(objective, [part], clip, count)
        own = own_draws(count, objective.parameters[0].device)
        with own if of_one is None else nullcontext(of_one) as draws:
            found = Found(*_tried(objective, inputs, targets), draws)
            with _remembering(objective) as objective:
                if not found.reason:
                    trees = inputs, targets
                    if objective.memory is not None:
                        from discreet.per_example.shared_rows import in_own_memory

                        trees = in_own_memory(*trees)  # code of one's own may write there
                    try:
                        parts = passes(objective, *trees, found.questions, draws)
                        return _summed(objective, parts, clip, count)
                    # Only this batch failed. How its examples affect each other is not known.
                    except Unserved as error:
                        found = found._replace(reason=str(error))
                with unmoved(objective.model):
                    built = _built(objective, inputs, targets, found)
                    return _summed(objective, built, clip, count)


@contextmanager
def _explained(objective: Objective, inputs: Tree, targets: Tree) -> Iterator[None]:
    """The context of a pass. After a failed pass the model is tried again at the next one, as the
    findings of its trial may come from inputs of a wrong type."""
    try:
        with (
            torch.set_grad_enabled(False),
            exact_products(objective.parameters[0].device),
            objective.casting(on=False),
        ):
            yield
    except BaseException as error:
        from discreet.per_example.wrong_inputs import explain  # for an error alone

        _trials.pop(objective.model, None)
        explain(error, objective, inputs, targets)
        raise


def _tried(objective: Objective, inputs: Tree, targets: Tree) -> tuple[str, Questions]:
    """Tries a model and a loss that are new here on made-up examples. Returns the reason why
    examples can't run side by side, or "", and the model's questions."""
    model = objective.model
    loss = objective.loss
    state = [
        (id(part), part.training, id(part.__dict__.get("forward"))) for part in objective.modules
    ]
    hooks = gradient_hooks(objective.modules, objective.trainable())
    key = state, objective.slots.keys(), objective.rounds, hooks
    known = _trials.get(model)
    is_new = known is None or known.state != key
    losses: list[ref[Loss]] = [] if known is None else known.losses
    tries_loss = not is_of_package(loss) and all(each() is not loss for each in losses)
    new = Trial(objective, inputs, targets)
    with _restored(new) if is_new or tries_loss else nullcontext(new) as trial:
        outputs = check_forward(trial) if is_new or tries_loss else None
        if known is None or is_new:
            _trials[model] = known = _Tried(key, *tried(trial), losses)
        if tries_loss:
            from discreet.per_example.loss_trial import check_loss  # for a loss of one's own

            check_loss(trial, outputs)
            with suppress(TypeError):  # a loss without weak references is tried at each step
                losses.append(ref(loss))
    if known.questions.settled and known.questions.numbers != numbers_of(objective.modules):
        known.changes += 1
        if known.changes > _MOST_CHANGES:
            known.questions.settled.clear()
        else:
            known.reason, known.questions = tried(trial)
    return known.reason, known.questions


@contextmanager
def _remembering(objective: Objective) -> Iterator[Objective]:
    """A context with the objective for passes over data. What they change outside of the model is
    undone, and the log says so once."""
    memory = memory_for(objective.modules, objective.loss, whole=False)
    yield replace(objective, memory=memory)
    for name in memory.changed if memory else ():
        if name not in _undone:
            _undone.add(name)
            _log.warning("the model's forward or the loss changes %s: undone after each pass", name)
    if memory and memory.too_large and memory.too_large not in _undone:
        _undone.add(memory.too_large)
        _log.warning(
            "%s, which the model's forward or the loss can write to, is too large to be looked "
            "through: what an example leaves there is not undone",
            memory.too_large,
        )


def _restored(trial: Trial) -> AbstractContextManager[Trial]:
    """A context with a trial of whose examples nothing may stay."""
    objective = trial.objective
    if is_of_package(objective.loss) and not has_own_code(objective.modules):
        return nullcontext(trial)  # layers and losses of PyTorch and Discreet keep nothing
    from discreet.per_example.left_outside import nothing_left

    return nothing_left(trial)


def _built(
    objective: Objective, inputs: Tree, targets: Tree, found: Found
) -> Iterator[GradientsOfSome]:
    """Gradients by a loop over examples, for some examples at a time."""
    count = count_of(inputs)
    device = objective.parameters[0].device
    held = floats_at_once(_BUILT_FLOATS, device)
    step = max(1, held // sum(slot.shape.numel() for slot in objective.slots.values()))
    for start in range(0, count, step):
        places = torch.arange(start, min(start + step, count), device=device)
        rows = max(len(places), min(step, FEWEST))
        some = tuple(filled(rows_of(tree, places), rows) for tree in (inputs, targets))
        draws = found.draws.of(places).filled(rows)
        yield GradientsOfSome(
            places, rows, built_terms(objective, some, draws, reason=found.reason)
        )


def _summed(
    objective: Objective, parts: Iterable[GradientsOfSome], clip: float, count: int
) -> tuple[Tensor, Tensor]:
    total = None
    norms = None
    for part in parts:
        terms, found = _finite(objective, part)
        if part.places is None:
            held = count
        else:
            held = len(part.places)
        weights = clip_factors(found, clip * LOSS_SCALE).mul_(_UNSCALE)
        if held < part.rows:  # padding does not count
            weights[held:] = 0
            found = found[:held]
        total = total or objective.parts()  # can reuse the memory of the backward pass
        # The last layer comes first: each frees its activations before the next, larger ones are
        # scaled.
        while terms:
            terms.pop().add_to(total, weights)
        found = found * _UNSCALE
        if part.places is None:
            norms = found
        else:
            if norms is None:
                norms = found.new_zeros(count)
            norms[part.places] = found
    assert total is not None
    assert norms is not None
    return total.total(), norms


def _finite(objective: Objective, part: GradientsOfSome) -> tuple[list[Term], Tensor]:
    """Terms of the examples, zero for those whose gradient is not finite, and the norms (rows,),
    inf for those.

    Such an example is replaced by zeros in the terms, since 0 * inf in the products would spoil the
    sum. It is not left out by a second pass: dropout would draw other masks for the others, so that
    their contributions would depend on it."""
    terms = part.terms
    if not terms:
        return terms, objective.zeros(part.rows)
    # A product of two masses may underflow: such a norm is negligible beside the least clip norm.
    total = total_mass(terms, objective.order)
    if objective.order == 1:
        norms = total
    else:
        norms = total.sqrt()
    if math.isfinite(norms.sum()):
        return terms, norms
    lost = ~norms.isfinite()
    return [without(term, lost) for term in terms], norms.masked_fill(lost, math.inf)
