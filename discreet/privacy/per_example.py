"""Clipped sums of per-example gradients, the quantity that DP-SGD releases with noise.

One forward and one backward pass give the norms of all per-example gradients from layer inputs and output gradients,
and one matrix product a layer gives the clipped sum (discreet/privacy/ghost/terms.py has the formulas and their
sources). A model with layers for which there is no such rule is served by torch.func, or example by example; the log
"discreet" then says so once.
"""

from __future__ import annotations

import math
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from discreet.privacy.ghost.choice import terms_of
from discreet.privacy.ghost.methods import LOSS_SCALE, Layout, Loss, Objective, cross_entropy
from discreet.privacy.ghost.terms import Slot, Term
from discreet.privacy.ghost.trial import norms_of

__all__ = ["Loss", "clipped_gradient_sum", "cross_entropy"]

# Norms carry rounding errors of up to about 1e-6; gradients are clipped this much shorter, so that none passes C.
_ROUNDING_MARGIN = 2e-6
_UNSCALE = torch.tensor(1 / LOSS_SCALE)

_layouts: WeakKeyDictionary[nn.Module, tuple[object, Layout]] = WeakKeyDictionary()


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
    layout = _layout(model)
    objective, count = Objective(model, layout, loss, order), inputs.shape[0]
    if count == 0 or not layout.slots:
        return layout.zeros(), layout.zeros().new_zeros(count)
    pieces = [(inputs, targets)]
    if micro_batch is not None and micro_batch < count:
        pieces = list(zip(torch.split(inputs, micro_batch), torch.split(targets, micro_batch), strict=True))
    total, norms = None, []
    with torch.set_grad_enabled(False):
        for some, wanted in pieces:
            total, found = _add_clipped(objective, some, wanted, clip=l2_norm_clip, total=total)
            norms.append(found)
    assert total is not None
    return total, norms[0] if len(norms) == 1 else torch.cat(norms)


def _validate(inputs: Tensor, targets: Tensor, clip: float, micro_batch: int | None, order: int) -> None:
    if not (0 < clip < math.inf):
        raise ValueError(f"l2_norm_clip must be finite and above 0, not {clip}")
    if micro_batch is not None and micro_batch < 1:
        raise ValueError(f"micro_batch must be at least 1, not {micro_batch}")
    if order not in (1, 2):
        raise ValueError(f"order must be 1 or 2, not {order}")
    if inputs.shape[0] != targets.shape[0]:
        raise ValueError(f"inputs and targets must be equally many, not {inputs.shape[0]} and {targets.shape[0]}")


def _layout(model: nn.Module) -> Layout:
    parameters = tuple(model.parameters())
    trained = [value.requires_grad for value in parameters]
    known = _layouts.get(model)
    if known is not None and known[0] == (list(map(id, parameters)), trained):
        return known[1]
    kinds = {(value.dtype, value.device) for value in parameters}
    if len(kinds) != 1 or parameters[0].dtype not in (torch.float32, torch.float64):
        raise ValueError("the model must have parameters, all float32 or all float64, on one device")
    shapes = tuple(value.shape for value in parameters)
    slots = {id(v): Slot(index, v.shape) for index, v in enumerate(parameters) if v.requires_grad}
    layout = Layout(parameters, tuple(shape.numel() for shape in shapes), shapes, slots)
    _layouts[model] = ((list(map(id, parameters)), trained), layout)
    return layout


def _add_clipped(
    objective: Objective, inputs: Tensor, targets: Tensor, *, clip: float, total: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Add the clipped gradients of n >= 1 examples to total, a new one if None; and the examples' norms, (n,)."""
    terms, finite_norms, norms = _finite_terms(objective, inputs, targets)
    fresh = total is None
    if total is None:  # only now, when the backward pass has let go of its memory
        total = objective.layout.unwritten()
    clip = clip * (1 - _ROUNDING_MARGIN)
    weights, parts = finite_norms.clamp_min(clip * LOSS_SCALE).reciprocal_(), objective.layout.parts(total, fresh=fresh)
    while terms:  # last layer first: each lets go of its activations before the next, larger ones are scaled
        terms.pop().add_to(parts, weights, clip)
    parts.finish()
    return total, norms * _UNSCALE


def _finite_terms(objective: Objective, inputs: Tensor, targets: Tensor) -> tuple[list[Term], Tensor, Tensor]:
    """Terms of the examples with finite gradients, the norms of those, and the norms of all, (n,), inf elsewhere.

    If there are others, a second pass does without them: in the products of the first, 0 * inf would poison the sum.
    """
    terms = terms_of(objective, inputs, targets)
    if not terms:
        norms = objective.layout.parameters[0].new_zeros(inputs.shape[0])
        return terms, norms, norms
    norms = norms_of(terms, objective.order)
    if math.isfinite(norms.sum()):
        return terms, norms, norms
    finite = norms.isfinite()
    if not finite.any():
        return [], norms[finite], torch.full_like(norms, math.inf)
    if finite.all():
        return terms, norms, norms
    terms, kept, some = _finite_terms(objective, inputs[finite], targets[finite])
    return terms, kept, torch.full_like(norms, math.inf).masked_scatter_(finite, some)
