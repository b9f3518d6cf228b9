"""Trying a method on a few examples, against plain autograd on single ones."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd

from discreet.privacy.ghost.methods import LOSS_SCALE, Method, Objective, looped, one_pass, vmapped
from discreet.privacy.ghost.terms import Term
from discreet.privacy.ghost.uncovered import Uncovered

TRIAL = 4  # examples that a method is tried on
_TOLERANCE = 1e-3  # of the norms compared: a wrong rule is off by far more, a tie that rounds the other way by less
_log = logging.getLogger("discreet")


def refuse_mixing(model: nn.Module) -> None:
    """ValueError for layers by which examples change each other's gradients, or by which chance enters."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, _BatchNorm) or (isinstance(module, _NormBase) and module.track_running_stats):
            raise ValueError(f"layer {name!r} ({kind}) mixes examples: use GroupNorm instead")
        if isinstance(module, _DropoutNd) and module.training and module.p > 0:
            raise ValueError(f"layer {name!r} ({kind}) draws random numbers: use eval mode, or set p to 0")


def norms_of(terms: list[Term], order: int) -> Tensor:
    """Norms (n,) of the gradients that the terms, one at least, make up together."""
    total = terms[0].mass(order)
    for term in terms[1:]:
        total = total + term.mass(order)
    return total if order == 1 else total.sqrt_()


def tried(objective: Objective, inputs: Tensor, targets: Tensor) -> Method | None:
    """The fastest method that agrees with single examples; None where fewer than two have finite gradients."""
    finite = norms_of(_truth(objective, inputs, targets), objective.order).isfinite()
    if int(finite.sum()) < 2:
        return None
    inputs, targets, reasons = inputs[finite], targets[finite], list[str]()
    for method, words in ((one_pass, "one pass"), (vmapped, "torch.func.vmap")):
        reason = _difference(method, objective, inputs, targets)
        if not reason:
            if reasons:
                say(objective.model, words, reasons)
            return method
        reasons.append(f"{words}: {reason}")
    say(objective.model, "a loop over examples", reasons)
    return looped


def _truth(objective: Objective, inputs: Tensor, targets: Tensor) -> list[Term]:
    """Gradients of single examples by plain autograd; ValueError, the generator put back, if they are random."""
    before = torch.get_rng_state()
    truth = looped(objective, inputs, targets)
    if not torch.equal(before, torch.get_rng_state()):
        torch.set_rng_state(before)
        raise ValueError("the model or its loss draws random numbers: put it in eval mode")
    return truth


def _difference(method: Method, objective: Objective, inputs: Tensor, targets: Tensor) -> str:
    """Why the method does not serve; empty where its norms and sums are those of single examples."""
    try:
        found = method(objective, inputs, targets)
    except (Uncovered, RuntimeError) as met:
        return str(met).partition("\n")[0]
    truth = looped(objective, inputs, targets)
    wanted = norms_of(truth, objective.order)
    norms = norms_of(found, objective.order) if found else torch.zeros_like(wanted)
    weights = torch.arange(1, len(inputs) + 1, dtype=norms.dtype, device=norms.device) / LOSS_SCALE
    sums = []
    for terms in (found, truth):
        sums.append(objective.layout.zeros())
        for term in terms:
            term.add_to(objective.layout.parts(sums[-1]), weights, 1.0)
    close = torch.allclose(norms, wanted, rtol=_TOLERANCE, atol=1e-6 * float(wanted.max()))
    agrees = close and bool((sums[0] - sums[1]).norm() <= _TOLERANCE * (weights * wanted).norm())
    return "" if agrees else "its gradients are not those of single examples"


def say(model: nn.Module, words: str, reasons: list[str]) -> None:
    """One line of the log for a model that the one-pass method does not serve."""
    _log.warning("gradients of %s by %s, which is slower: %s", type(model).__name__, words, "; ".join(reasons))
