"""Which method serves a model: the first that agrees with plain autograd, tried once for each kind of model."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from discreet.privacy.ghost.methods import Method, Objective, looped, one_pass
from discreet.privacy.ghost.terms import Term
from discreet.privacy.ghost.trial import TRIAL, refuse_mixing, say, tried
from discreet.privacy.ghost.uncovered import Uncovered

_known: WeakKeyDictionary[nn.Module, tuple[Hashable, Method]] = WeakKeyDictionary()
_by_structure: dict[Hashable, Method] = {}


def terms_of(objective: Objective, inputs: Tensor, targets: Tensor) -> list[Term]:
    """Terms for a batch (n >= 1 examples) by the fastest method that is right for this model."""
    key = _key(objective, inputs, targets)
    known = _known.get(objective.model)
    method = known[1] if known is not None and known[0] == key else _chosen(objective, inputs, targets, key)
    if method is one_pass:
        try:
            return one_pass(objective, inputs, targets)
        except Uncovered as met:  # the model's code took another way than in its trial
            method = looped
            _remember(objective, key, method)
            say(objective.model, "a loop over examples", [str(met)])
    refuse_mixing(objective.model)
    return method(objective, inputs, targets)


def _chosen(objective: Objective, inputs: Tensor, targets: Tensor, key: Hashable) -> Method:
    refuse_mixing(objective.model)
    method = _by_structure.get((_structure(objective), key))
    method = method or tried(objective, inputs[:TRIAL], targets[:TRIAL])
    if method is None:  # too few to compare, so this batch goes by the method that needs no comparison
        return looped
    _remember(objective, key, method)
    return method


def _remember(objective: Objective, key: Hashable, method: Method) -> None:
    _known[objective.model] = (key, method)
    _by_structure[(_structure(objective), key)] = method


def _key(objective: Objective, inputs: Tensor, targets: Tensor) -> Hashable:
    """What may change from call to call and ask for another trial."""
    loss: Any = objective.loss
    while isinstance(loss, partial):
        loss = loss.func
    shapes = (inputs.shape[1:], targets.shape[1:], inputs.dtype, targets.dtype, inputs.device)
    trained = (objective.model.training, len(objective.layout.slots), objective.layout.sizes)
    return (getattr(loss, "__code__", loss), objective.order, *trained, *shapes)


def _structure(objective: Objective) -> Hashable:
    """What decides how a model computes, so that a copy of a model known already needs no trial of its own."""
    model = objective.model
    modules = tuple((name, type(module), _frozen(vars(module))) for name, module in model.named_modules())
    return modules, tuple((name, value.shape, value.requires_grad) for name, value in model.named_parameters())


def _frozen(value: object) -> Hashable:
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, dict):
        return tuple((name, _frozen(part)) for name, part in value.items())
    if isinstance(value, tuple | list):
        return tuple(_frozen(part) for part in value)
    kind: Any = value.__code__ if isinstance(value, FunctionType) else type(value)
    return kind  # type: ignore[no-any-return]
