"""Noise for a target epsilon, rounds within a budget, and per-round budgets for a total."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from discreet.accounting.events import PLD, RDP, check_positive
from discreet.accounting.privacy_ledger import PrivacyLedger

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    Entries = Sequence[tuple[DpEvent, int]]

NOISE_RANGE = (1e-3, 1e6)  # the noise multipliers that are searched
MAX_ROUNDS = 10_000_000
_PRECISION = 1e-4  # relative, of a noise multiplier
# Renyi orders
_FEW_ORDERS = (1.3, 1.6, 2, 2.5, 3, 4, 5, 6.5, 8, 10, 13, 16, 20, 25, 32, 40, 50, 63)
_SCHEDULE_RATIO = 0.9  # of a round's epsilon to that of the round before it
# share of a total kept back, so that rounding never lifts a schedule's sum above it
_ROUNDING = 2.0**-40


def noise_multiplier_for_epsilon(
    target_epsilon: float,
    *,
    releases: Callable[[float], Entries],
    delta: float,
    accountant: str = PLD,
) -> float:
    """The smallest noise multiplier with which releases cost at most a target epsilon, to a
    relative precision of 1e-4 and rounded up. `releases` maps a noise multiplier to events, each
    with its count; some may not depend on the noise multiplier. Raises ValueError: no value in
    NOISE_RANGE meets the target, or every value does.

    >>> from discreet.accounting.events import poisson_round_event
    >>> rounds = lambda noise: ((poisson_round_event(0.1, noise_multiplier=noise), 512),)
    >>> round(noise_multiplier_for_epsilon(3.7697, releases=rounds, delta=1e-6), 2)
    3.0
    """
    check_positive("target_epsilon", target_epsilon)

    def epsilon(noise: float) -> float:
        return PrivacyLedger(tuple(releases(noise))).epsilon(delta, accountant)

    if accountant == RDP:
        noise = _by_few_orders(target_epsilon, releases, delta)
        # By all orders it may cost slightly less than the target. If it costs much less, a smaller
        # noise multiplier exists.
        if (
            noise is not None
            and (1 - _PRECISION / 2) * target_epsilon <= epsilon(noise) <= target_epsilon
        ):
            return noise
    return _search(target_epsilon, epsilon)


def _by_few_orders(
    target: float, releases: Callable[[float], Entries], delta: float
) -> float | None:
    """The noise multiplier by the Renyi orders near the best one, in a third of the time; None if
    these orders find none. It is never too small, because each order alone bounds epsilon."""
    from discreet.accounting.accounting import RDP_ORDERS, rdp_epsilon

    def epsilon(noise: float, orders: Sequence[float]) -> float:
        return rdp_epsilon(releases(noise), delta=delta, orders=orders)

    try:
        rough = _search(target, lambda noise: epsilon(noise, _FEW_ORDERS), precision=0.05)
        best = min(_FEW_ORDERS, key=lambda order: epsilon(rough, [order]))
        if best < _FEW_ORDERS[-1]:
            most = 1.3 * best
        else:
            most = math.inf
        near = [order for order in RDP_ORDERS if best / 1.3 <= order <= most]
        return _search(target, lambda noise: epsilon(noise, near))
    except ValueError:
        return None


def _search(
    target: float, epsilon: Callable[[float], float], precision: float = _PRECISION
) -> float:
    """The smallest noise multiplier that meets a target, to a relative precision and rounded up."""
    # Imported here: a client that calibrates nothing starts without it.
    from scipy.optimize import brentq

    def log_ratio(log_noise: float) -> float:
        """The log of the target over epsilon, bounded if epsilon is 0 or infinite."""
        spent = epsilon(math.exp(log_noise))
        if spent:
            return min(max(-50.0, math.log(target) - math.log(spent)), 50.0)
        return 50.0

    enough = _power_of_two_that_meets(target, epsilon)
    root = brentq(log_ratio, math.log(enough / 2), math.log(enough), xtol=precision / 5)
    # The root is known to a fifth of the precision, so a few steps up suffice.
    tried = (math.exp(root + step * precision / 5) for step in range(1, 5))
    return next((noise for noise in tried if epsilon(noise) <= target), enough)


def _power_of_two_that_meets(target: float, epsilon: Callable[[float], float]) -> float:
    noise = 1.0
    while epsilon(noise) > target:
        noise *= 2
        if noise > NOISE_RANGE[1]:
            raise ValueError(
                f"target_epsilon {target} is out of reach: with noise_multiplier {noise / 2:g} "
                f"epsilon is still {epsilon(noise / 2):.3g}"
            )
    while epsilon(noise / 2) <= target:
        noise /= 2
        if noise < NOISE_RANGE[0]:
            raise ValueError(
                f"target_epsilon {target} is met by every noise_multiplier down to {noise:g}: it "
                "asks for no noise"
            )
    return noise


def rounds_within(
    max_epsilon: float, epsilon: Callable[[int], float], *, most: int = MAX_ROUNDS
) -> int:
    """The largest number of rounds whose cost, `epsilon(rounds)`, is within `max_epsilon`; 0 if not
    even one round fits. Raises ValueError: more than `most` fit.

    >>> rounds_within(1.0, lambda count: count / 10)
    10
    """
    high = 1
    while epsilon(high) <= max_epsilon:
        if high >= most:
            raise ValueError(
                f"more than {most} rounds fit within max_epsilon {max_epsilon}: not computed"
            )
        high = min(2 * high, most)
    return bisect_right(range(high), max_epsilon, lo=high // 2 + 1, key=epsilon) - 1


def epsilon_schedule(
    total_epsilon: float, *, kind: str | Sequence[float], rounds: int
) -> tuple[float, ...]:
    """Per-round pure epsilons that add up to a total. ``kind`` is ``"uniform"``, ``"geometric"``
    (each round gets 0.9 times the epsilon of the round before it), or a list of the rounds' shares,
    which are scaled to the total. A share of 1e-12 is kept back, so that rounding never lifts the
    releases' epsilons above the total.

    >>> [round(e, 6) for e in epsilon_schedule(2.71, kind="geometric", rounds=3)]
    [1.0, 0.9, 0.81]
    """
    ratio = {"uniform": 1.0, "geometric": _SCHEDULE_RATIO}
    if isinstance(kind, str):
        shares = [ratio[kind] ** t for t in range(rounds)]
    else:
        shares = [float(share) for share in kind]
    whole = math.fsum(shares)
    return tuple(total_epsilon * (1 - _ROUNDING) * (share / whole) for share in shares)
