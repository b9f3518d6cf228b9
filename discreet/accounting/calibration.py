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

NOISE_RANGE = (1e-3, 1e6)  # noise multipliers that are searched
MAX_ROUNDS = 10_000_000
_PRECISION = 1e-4  # relative, of a noise multiplier
_FEW_ORDERS = (1.3, 1.6, 2, 2.5, 3, 4, 5, 6.5, 8, 10, 13, 16, 20, 25, 32, 40, 50, 63)  # of RDP
_SCHEDULE_RATIO = 0.9  # of a round's epsilon to that of the round before it
_ROUNDING = 2.0**-40  # part of a total kept back, so that a schedule's sum never passes it by rounding


def noise_multiplier_for_epsilon(
    target_epsilon: float,
    *,
    make_event: Callable[[float], DpEvent],
    count: int,
    delta: float,
    accountant: str = PLD,
) -> float:
    """The smallest noise multiplier with which ``count`` releases of ``make_event(noise_multiplier)`` cost at most a
    target, to a relative precision of 1e-4 and rounded up. Raises ValueError: none within NOISE_RANGE meets the
    target, or any does.

    >>> from discreet.accounting.events import poisson_round_event
    >>> event = lambda noise: poisson_round_event(0.1, noise_multiplier=noise)
    >>> round(noise_multiplier_for_epsilon(3.7697, make_event=event, count=512, delta=1e-6), 2)
    3.0
    """
    check_whole("count", count)
    return noise_multiplier_for_releases(
        target_epsilon, releases=lambda noise: ((make_event(noise), count),), delta=delta, accountant=accountant
    )


def noise_multiplier_for_releases(
    target_epsilon: float,
    *,
    releases: Callable[[float], Sequence[tuple[DpEvent, int]]],
    delta: float,
    accountant: str = PLD,
) -> float:
    """As `noise_multiplier_for_epsilon`, for releases of several kinds together: `releases` gives the events of a noise
    multiplier, each with its count. Some may not depend on it."""
    check_positive("target_epsilon", target_epsilon)

    def epsilon(noise: float) -> float:
        return PrivacyLedger(tuple(releases(noise))).epsilon(delta, accountant)

    if accountant == RDP:
        noise = _by_few_orders(target_epsilon, releases, delta)
        # By all orders it may cost less than the target, but hardly less: otherwise there is a smaller one.
        if noise is not None and (1 - _PRECISION / 2) * target_epsilon <= epsilon(noise) <= target_epsilon:
            return noise
    return _search(target_epsilon, epsilon)


def _by_few_orders(
    target: float, releases: Callable[[float], Sequence[tuple[DpEvent, int]]], delta: float
) -> float | None:
    """The noise multiplier by the Renyi orders near the best one, which takes a fraction of the time of all orders.

    It is never too small, because each order alone bounds epsilon. None if these orders find none.
    """
    from discreet.accounting.accounting import RDP_ORDERS, rdp_epsilon

    def epsilon(noise: float, orders: Sequence[float]) -> float:
        return rdp_epsilon(releases(noise), delta=delta, orders=orders)

    try:
        rough = _search(target, lambda noise: epsilon(noise, _FEW_ORDERS), precision=0.05)
        best = min(_FEW_ORDERS, key=lambda order: epsilon(rough, [order]))
        most = 1.3 * best if best < _FEW_ORDERS[-1] else math.inf
        near = [order for order in RDP_ORDERS if best / 1.3 <= order <= most]
        return _search(target, lambda noise: epsilon(noise, near))
    except ValueError:
        return None


def _search(target: float, epsilon: Callable[[float], float], precision: float = _PRECISION) -> float:
    """The smallest noise multiplier that meets a target, to a relative precision and rounded up."""
    from scipy.optimize import brentq  # imported here: a client that calibrates nothing starts without it

    def log_ratio(log_noise: float) -> float:  # of the target to epsilon, bounded if epsilon is 0 or infinite
        spent = epsilon(math.exp(log_noise))
        return min(max(-50.0, math.log(target) - math.log(spent)), 50.0) if spent else 50.0

    enough = _power_of_two_that_meets(target, epsilon)
    root = brentq(log_ratio, math.log(enough / 2), math.log(enough), xtol=precision / 5)
    # The root is known to a fifth of the precision: go up from there.
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
                f"target_epsilon {target} is met by every noise_multiplier down to {noise:g}: it asks for no noise"
            )
    return noise


def rounds_within(max_epsilon: float, *, event: DpEvent, delta: float, accountant: str = PLD) -> int:
    """The number of releases of ``event`` that fit before the epsilon at ``delta`` passes ``max_epsilon``: 0 if not
    one fits. Raises ValueError: more than MAX_ROUNDS fit.

    >>> from dp_accounting import LaplaceDpEvent
    >>> rounds_within(1.0, event=LaplaceDpEvent(10.0), delta=1e-9)
    10
    """
    if not max_epsilon >= 0.0:
        raise ValueError(f"max_epsilon must be at least 0, not {max_epsilon}")

    def epsilon(count: int) -> float:
        return PrivacyLedger(((event, count),)).epsilon(delta, accountant)

    high = 1
    while epsilon(high) <= max_epsilon:
        if high >= MAX_ROUNDS:
            raise ValueError(f"more than {MAX_ROUNDS} rounds of {event} fit within max_epsilon {max_epsilon}")
        high = min(2 * high, MAX_ROUNDS)
    return bisect_right(range(high), max_epsilon, lo=high // 2 + 1, key=epsilon) - 1


def epsilon_schedule(total_epsilon: float, *, kind: str | Sequence[float], rounds: int) -> tuple[float, ...]:
    """Per-round pure epsilons that add up to a total. ``kind`` is ``"uniform"``, ``"geometric"`` (each round gets 0.9
    times that of the round before it), or a list of the rounds' shares, which are scaled to the total. A part of 1e-12
    is kept back, so that the releases' epsilons never pass the total by rounding.

    >>> [round(e, 6) for e in epsilon_schedule(2.71, kind="geometric", rounds=3)]
    [1.0, 0.9, 0.81]
    """
    check_whole("rounds", rounds)
    check_positive("total_epsilon", total_epsilon)
    if kind == "uniform":
        shares = [1.0] * rounds
    elif kind == "geometric":
        shares = [math.exp(t * math.log(_SCHEDULE_RATIO)) for t in range(rounds)]
    elif isinstance(kind, str):
        raise ValueError(f"kind must be 'uniform', 'geometric' or a list of shares, not {kind!r}")
    else:
        shares = [float(share) for share in kind]
    if len(shares) != rounds:
        raise ValueError(f"a list of shares must have one for each of the {rounds} rounds, not {len(shares)}")
    for share in shares:
        check_positive("a share of the schedule", share)
    whole = math.fsum(shares)
    return tuple(total_epsilon * (1 - _ROUNDING) * (share / whole) for share in shares)


def check_whole(name: str, value: int) -> None:
    """Raises ValueError unless a setting is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
