"""Discrete-time survival: probabilities from hazards, and Harrell's concordance.

A target is (n, intervals): 0 for an interval that was survived, 1 for that of the event, and
`PADDING` for those after the event or the end of the follow-up. A model's outputs are the logits of
the hazards, the probability of the event in an interval for those who reach it (Singer and Willett
1993, equation 7).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from discreet.data.targets import Array
from discreet.per_example.objective import PADDING


def hazard_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The negative log likelihood of each example, (n,), for logits of hazards (n, intervals): the
    sum over the intervals that it was followed (Singer and Willett 1993, equation 10)."""
    followed = targets != PADDING
    known = targets.where(followed, torch.zeros_like(targets)).to(outputs.dtype)
    each = functional.binary_cross_entropy_with_logits(outputs, known, reduction="none")
    return (each * followed).sum(dim=1)


def survived(outputs: Tensor) -> Tensor:
    """The probability of no event until the end of each interval, (n, intervals), from logits of
    hazards.

    >>> survived(torch.zeros(1, 3)).tolist()
    [[0.5, 0.25, 0.125]]
    """
    return functional.logsigmoid(-outputs).cumsum(dim=1).exp()


def followed_up(targets: Tensor) -> tuple[Array, Array]:
    """The number of intervals that each example survived, (n,), and whether the event came in the
    next one, (n,)."""
    return (targets == 0).sum(dim=1).cpu().numpy(), (targets == 1).any(dim=1).cpu().numpy()


def risk_of(chances: Tensor) -> Array:
    """A score that is larger for those with an earlier event, (n,), from the `survived`
    probabilities: the negative number of intervals that are expected to be survived."""
    risk: Array = -chances.sum(dim=1).double().cpu().numpy()
    return risk


def concordance(risk: Array, targets: Tensor) -> float:
    """Harrell's C (1982): of all pairs of which one is known to have its event in an earlier
    interval, the share in which it has the higher risk; ties count half. NaN without such pairs, or
    with a risk that is not finite.

    >>> known = torch.tensor([[1.0, PADDING], [0.0, 1.0], [0.0, PADDING]])
    >>> concordance(np.array([3.0, 2.0, 1.0]), known)
    1.0
    """
    intervals, has_event = followed_up(targets)
    won = 0.0
    pairs = 0
    if not np.isfinite(risk).all():
        return float("nan")
    for each in range(targets.shape[1]):
        earlier = risk[has_event & (intervals == each)]
        later = np.sort(risk[intervals > each])
        below = np.searchsorted(later, earlier, "left")
        not_above = np.searchsorted(later, earlier, "right")
        won += float((below + not_above).sum()) / 2
        pairs += len(earlier) * len(later)
    return won / pairs if pairs else float("nan")
