"""Renyi differential privacy beside the accountant of a run: chosen orders, the older conversion, whole curves."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from dp_accounting import NonPrivateDpEvent
from dp_accounting.rdp import compute_epsilon
from numpy.typing import NDArray

from discreet.privacy.accounting import RDP_ORDERS, Entries, merged, require_delta, summed_rdp

PRIMIHUB_ORDERS = tuple([1 + x / 10 for x in range(1, 100)] + list(range(12, 64)))


MOMENTS_ORDERS = tuple(float(order) for order in range(2, 34))  # the 32 moments of Abadi et al. 2016


def rdp_epsilon(
    entries: Entries, *, delta: float, orders: Sequence[float] = RDP_ORDERS, classic: bool = False
) -> float:
    """Epsilon by Renyi differential privacy at chosen orders, otherwise as ``epsilon_spent(accountant="rdp")``.

    With ``PRIMIHUB_ORDERS`` it is what that system reports. ``classic`` takes the conversion that older published
    numbers used, the smallest rdp(order) + log(1 / delta) / (order - 1) (Mironov 2017, Proposition 3): it holds as
    well, and is larger. With it and ``MOMENTS_ORDERS`` this is the moments accountant of Abadi et al. 2016.
    """
    require_delta(delta)
    if not orders or min(orders) <= 1:
        raise ValueError(f"orders must be above 1, and at least one, not {tuple(orders)}")
    counts = merged(entries)
    if not counts:
        return 0.0
    if NonPrivateDpEvent() in counts:
        return math.inf
    if classic:
        return float(np.min(summed_rdp(counts, tuple(orders)) - math.log(delta) / (np.array(orders) - 1)))
    return float(compute_epsilon(orders, summed_rdp(counts, tuple(orders)), delta)[0])


def rdp_curve(entries: Entries) -> NDArray[np.float64]:
    """The Renyi divergence of all releases together at each of ``RDP_ORDERS``; infinite if there is no noise, or at an
    order that was given up.

    Raises:
        ValueError: as ``epsilon_spent``.
    """
    counts = merged(entries)
    return np.full(len(RDP_ORDERS), math.inf) if NonPrivateDpEvent() in counts else summed_rdp(counts, RDP_ORDERS)
