"""Clipping: what bounds the part that one client, or one example, can have in a sum.

At the privacy boundary an update is one vector of shape (num_params,). The same function serves per-example gradients,
client updates and audit canaries. Sums of clipped updates: `clipped_sum`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# A clipped row is scaled to this share of the clip norm, so that rounding in float32 can't lift it above the clip norm.
ROUNDING_MARGIN = 1 - 2.0**-20


def row_norms(rows: Tensor, *, order: float = 2) -> Tensor:
    """Norms of rows (n, d) as float64 (n,). A row with NaN or infinity has the norm infinity."""
    norms = torch.linalg.vector_norm(rows.to(torch.float64), ord=order, dim=1)
    return torch.where(torch.isfinite(norms), norms, torch.inf)


def clip_by_norm(rows: Tensor, norm_clip: float, *, order: float = 2) -> tuple[Tensor, Tensor]:
    """Scales each row to a norm of at most `norm_clip`.

    Guarantee: every row of the result has an L-`order` norm of at most `norm_clip`, whatever came in, so adding or
    removing one row moves the sum of the rows by at most `norm_clip` (replacing one, by at most twice that).

    Args:
      rows: (n, d), any floating dtype; n may be 0. A row that is not finite becomes zero.
      norm_clip: the largest norm, 0 or above; infinity clips nothing (and still drops rows that are not finite).
      order: 2 for Gaussian noise, 1 for Laplace noise.

    Returns:
      The clipped rows (n, d), float32 or float64, and the norms before clipping (n,), float64, infinity for rows that
      are not finite.

    Source: Abadi et al. 2016, Algorithm 1; for whole updates McMahan et al. 2018.

    >>> clipped, norms = clip_by_norm(torch.tensor([[3.0, 4.0], [0.0, 0.1]]), 1.0)
    >>> norms.tolist()[0], round(clipped.norm(dim=1)[0].item(), 4)
    (5.0, 1.0)
    """
    if math.isnan(norm_clip) or norm_clip < 0:
        raise ValueError(f"norm_clip must be a number of at least 0 (got {norm_clip})")
    if rows.dim() != 2 or not rows.is_floating_point():
        raise ValueError(f"rows must be floating point of shape (n, d), got {rows.dtype} of {tuple(rows.shape)}")
    # Half precision overflows in its own norm and rounds coarsely: float32 is the least that leaves here.
    rows = rows if rows.dtype == torch.float64 else rows.to(torch.float32)
    norms = row_norms(rows, order=order)
    if bool(((norms <= norm_clip) & (norms < math.inf)).all()):
        return rows.clone(), norms
    scale = torch.where(norms > norm_clip, norm_clip * ROUNDING_MARGIN / norms, 1.0)
    clipped = rows.to(torch.float64, copy=True).mul_(scale.unsqueeze(1))
    # 0 * inf is NaN, so a row that is not finite is replaced, not scaled.
    clipped[~torch.isfinite(norms)] = 0.0
    return clipped.to(rows.dtype), norms
