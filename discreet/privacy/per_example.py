"""Clipped sums of per-example gradients, the quantity that DP-SGD releases with noise.

If every layer of a model has a rule, one forward and one backward pass give the norms of all per-example gradients from
layer inputs and output gradients, and one matrix product a layer gives the clipped sum (`rules/terms.py` has the
formulas and their sources). Every other model is served by torch.func, and the log "discreet" says so once. Which of
the two it is follows from the layers alone (`rules/one_pass.py`).
"""

from __future__ import annotations

import math
from functools import reduce
from operator import add

import torch
from torch import Tensor, nn

from discreet.privacy.clipping import clip_factors
from discreet.privacy.rules.any_model import built_terms
from discreet.privacy.rules.objective import LOSS_SCALE, Loss, Objective, cross_entropy, layout_of
from discreet.privacy.rules.one_pass import layers_with_rules, one_pass
from discreet.privacy.rules.terms import Parts, Term

__all__ = ["Loss", "clipped_gradient_sum", "cross_entropy"]

_UNSCALE = torch.tensor(1 / LOSS_SCALE)
# Floats of gradients that are built at once, if they have to be: 256 MB of float32.
_BUILT_FLOATS = 2**26


def clipped_gradient_sum(
    model: nn.Module,
    inputs: Tensor,
    *,
    targets: Tensor,
    l2_norm_clip: float,
    loss: Loss = cross_entropy,
    micro_batch: int | None = None,
    order: int = 2,
) -> tuple[Tensor, Tensor]:
    """The sum of per-example gradients, each clipped to a norm, and the norms before clipping.

    With g_i the gradient of example i's loss, total = sum_i g_i min(1, C / ||g_i||) with C = l2_norm_clip (Abadi et
    al. 2016, Algorithm 1, without the noise).

    Args:
      model: all float32 or all float64; called on whole batches, and left as it was (gradients, hooks, modes).
      inputs: (n, ...), of any type that the model takes.
      targets: (n, ...), as the loss takes them.
      l2_norm_clip: C, finite and above 0, in the gradient's units.
      loss: from outputs (n, ...) and targets to one value an example, (n,), that depends on that example alone.
      micro_batch: the most examples in memory at once; None for all. The result differs by rounding only.
      order: 2 clips L2 norms. 1 clips L1 norms, for Laplace noise: then C bounds the L1 norm.

    Returns:
      total, (num_params,), in the order of model.parameters(), tied parameters once, zero for frozen ones.
      norms, (n,), of that order. A gradient that is not finite, or whose squared norm overflows, counts as zero in
      the sum, and its norm is inf.

    Sensitivity: adding or removing one example changes total by at most C in the norm of that order, up to the
    rounding of the float sum itself. n = 0 gives zeros and no norms.

    Raises:
      ValueError: a setting out of range; a layer that mixes examples (BatchNorm) or draws random numbers (dropout in
        training mode); parameters of other types or on several devices; a loss that is not (n,).

    >>> x, y = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([0, 1])
    >>> total, norms = clipped_gradient_sum(nn.Linear(2, 2), x, targets=y, l2_norm_clip=0.25)
    >>> total.shape, bool(total.norm() <= 0.5), bool((norms > 0).all())
    (torch.Size([6]), True, True)
    """
    _validate(inputs, targets, l2_norm_clip, micro_batch, order)
    layout = layout_of(model)
    objective, layers, total = Objective(model, layout, loss, order), layers_with_rules(model), layout.unwritten()
    if len(inputs) == 0 or not layout.slots:
        return total.zero_(), total.new_zeros(len(inputs))
    fitting = len(inputs) if layers is not None else max(1, _BUILT_FLOATS // len(total))
    step, parts = min(fitting, micro_batch or len(inputs)), layout.parts(total)
    batches = [(inputs, targets)]
    if step < len(inputs):
        batches = list(zip(torch.split(inputs, step), torch.split(targets, step), strict=True))
    with torch.set_grad_enabled(False):
        norms = [_add_clipped(objective, layers, batch, clip=l2_norm_clip, parts=parts) for batch in batches]
        parts.finish()
    return total, torch.cat(norms)


def _validate(inputs: Tensor, targets: Tensor, clip: float, micro_batch: int | None, order: int) -> None:
    if not (0 < clip < math.inf):
        raise ValueError(f"l2_norm_clip must be finite and above 0, not {clip}")
    if micro_batch is not None and micro_batch < 1:
        raise ValueError(f"micro_batch must be at least 1, not {micro_batch}")
    if order not in (1, 2):
        raise ValueError(f"order must be 1 or 2, not {order}")
    if inputs.shape[0] != targets.shape[0]:
        raise ValueError(f"inputs and targets must be equally many, not {inputs.shape[0]} and {targets.shape[0]}")


Batch = tuple[Tensor, Tensor]  # inputs and targets


def _add_clipped(
    objective: Objective, layers: list[nn.Module] | None, batch: Batch, *, clip: float, parts: Parts
) -> Tensor:
    """Adds the clipped gradients of n >= 1 examples to `parts`; gives the examples' norms, (n,)."""
    terms, finite_norms, norms = _finite_terms(objective, layers, batch)
    weights = clip_factors(finite_norms, clip * LOSS_SCALE)
    while terms:  # last layer first: each lets go of its activations before the next, larger ones are scaled
        terms.pop().add_to(parts, weights, 1 / LOSS_SCALE)
    return norms * _UNSCALE


def _finite_terms(
    objective: Objective, layers: list[nn.Module] | None, batch: Batch
) -> tuple[list[Term], Tensor, Tensor]:
    """Terms of the examples with finite gradients, the norms of those, and the norms of all, (n,), inf elsewhere.

    If there are others, a second pass does without them: in the products of the first, 0 * inf would poison the sum.
    """
    terms = built_terms(objective, *batch) if layers is None else one_pass(objective, layers, *batch)
    if not terms:
        norms = objective.layout.parameters[0].new_zeros(len(batch[0]))
        return terms, norms, norms
    norms = _norms(terms, objective.order)
    if math.isfinite(norms.sum()):
        return terms, norms, norms
    finite = norms.isfinite()
    if not finite.any():
        return [], norms[finite], torch.full_like(norms, math.inf)
    if finite.all():  # their sum alone overflows
        return terms, norms, norms
    terms, kept, some = _finite_terms(objective, layers, (batch[0][finite], batch[1][finite]))
    return terms, kept, torch.full_like(norms, math.inf).masked_scatter_(finite, some)


def _norms(terms: list[Term], order: int) -> Tensor:
    """Norms (n,) of the gradients that the terms, one at least, make up together."""
    total = reduce(add, (term.mass(order) for term in terms))
    return total if order == 1 else total.sqrt()
