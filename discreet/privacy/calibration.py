"""The other way round: noise for a target epsilon, per-round budgets for a total."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from discreet.privacy.accountants import PLD
from discreet.privacy.privacy_ledger import PrivacyLedger

if TYPE_CHECKING:
    from dp_accounting import DpEvent


NOISE_RANGE = (1e-3, 1e6)  # noise multipliers that are searched
_PRECISION = 1e-4  # relative, of a noise multiplier


_ROUNDING = 2.0**-40  # part of a total kept back, so that a schedule's sum never passes it by rounding


def noise_multiplier_for_epsilon(
    target_epsilon: float,
    *,
    make_event: Callable[[float], DpEvent],
    count: int,
    delta: float,
    accountant: str = PLD,
) -> float:
    """The smallest noise multiplier with which ``count`` releases of ``make_event(noise_multiplier)`` cost at
    most a target.

    Found to a relative precision of 1e-4 and rounded up: at ``delta`` and by the same accountant it never costs more
    than ``target_epsilon``. The adjacency is that of the event. With unsampled Gaussian events this is the analytic
    Gaussian mechanism (Balle and Wang 2018), not the classical formula.

    Raises:
        ValueError: a target that is not finite and positive, a count below 1, no noise multiplier within NOISE_RANGE
            that meets the target (too strict, or so loose that any does), or as ``epsilon_spent``.

    >>> from discreet.privacy.events import poisson_round_event
    >>> event = lambda noise: poisson_round_event(0.1, noise_multiplier=noise)
    >>> round(noise_multiplier_for_epsilon(3.7697, make_event=event, count=512, delta=1e-6), 2)
    3.0
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"count must be a whole number of at least 1, not {count!r}")
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
    """The smallest noise multiplier with which releases of several kinds together cost at most a target.

    `releases` says of a noise multiplier which events it makes, each with how often; it may hold events that do not
    depend on it. Otherwise as `noise_multiplier_for_epsilon`.
    """
    if not 0.0 < target_epsilon < math.inf:
        raise ValueError(f"target_epsilon must be finite and above 0, not {target_epsilon}")

    def epsilon(noise: float) -> float:
        return PrivacyLedger(tuple(releases(noise))).epsilon(delta, accountant)

    return _smallest_noise(epsilon, target_epsilon)


def _smallest_noise(epsilon: Callable[[float], float], target: float) -> float:
    from scipy.optimize import brentq  # imported here: a client that calibrates nothing starts without it

    def log_ratio(log_noise: float) -> float:  # of the target to epsilon, bounded if epsilon is 0 or infinite
        spent = epsilon(math.exp(log_noise))
        if spent == 0:
            return 50.0
        return max(-50.0, math.log(target) - math.log(spent)) if spent < math.inf else -50.0

    low, high = _bracket(epsilon, target)
    root = brentq(log_ratio, low, high, xtol=_PRECISION / 5)
    for step in range(1, 5):  # the root is known to a fifth of the precision: go up from there
        noise = math.exp(root + step * _PRECISION / 5)
        if epsilon(noise) <= target:
            return noise
    return math.exp(high)


def _bracket(epsilon: Callable[[float], float], target: float) -> tuple[float, float]:
    """Logarithms of two noise multipliers, a factor of two apart: only the first costs more than the target."""
    high = 1.0
    while epsilon(high) > target:
        high *= 2
        if high > NOISE_RANGE[1]:
            raise ValueError(
                f"target_epsilon {target} is out of reach: with noise_multiplier {high / 2:g} "
                f"epsilon is still {epsilon(high / 2):.3g}"
            )
    while epsilon(high / 2) <= target:
        high /= 2
        if high < NOISE_RANGE[0]:
            raise ValueError(
                f"target_epsilon {target} is met by every noise_multiplier down to {high:g}: it asks for no noise"
            )
    return math.log(high / 2), math.log(high)


def epsilon_schedule(
    total_epsilon: float, *, kind: str | Sequence[float], rounds: int, ratio: float = 0.9
) -> tuple[float, ...]:
    """Per-round pure epsilons, one for each round, that add up to a total.

    ``kind`` is ``"uniform"``, ``"geometric"`` (each round gets ``ratio`` times what the round before it got:
    a ratio below 1 spends more on the early rounds, above 1 on the late ones), or a list of the rounds'
    shares, which are scaled to the total. A part of 1e-12 is kept back, so that the releases' epsilons never
    pass the total by rounding.

    Raises:
        ValueError: a total, a ratio or a share that is not finite and positive, rounds below 1, a list of
            another length, or an unknown kind.

    >>> [round(e, 6) for e in epsilon_schedule(7.0, kind="geometric", rounds=3, ratio=2.0)]
    [1.0, 2.0, 4.0]
    """
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise ValueError(f"rounds must be a whole number of at least 1, not {rounds!r}")
    shares = _shares(kind, rounds, ratio)
    for name, value in [
        ("total_epsilon", total_epsilon),
        *(("a share of the schedule", share) for share in shares),
    ]:
        if not 0.0 < value < math.inf:
            raise ValueError(f"{name} must be finite and above 0, not {value}")
    whole = math.fsum(shares)
    return tuple(total_epsilon * (1 - _ROUNDING) * (share / whole) for share in shares)


def _shares(kind: str | Sequence[float], rounds: int, ratio: float) -> list[float]:
    if kind == "uniform":
        return [1.0] * rounds
    if kind == "geometric":
        if not 0.0 < ratio < math.inf:
            raise ValueError(f"ratio must be finite and above 0, not {ratio}")
        return [math.exp((t - (rounds - 1) * (ratio > 1)) * math.log(ratio)) for t in range(rounds)]
    if isinstance(kind, str):
        raise ValueError(f"kind must be 'uniform', 'geometric' or a list of shares, not {kind!r}")
    if len(kind) != rounds:
        raise ValueError(f"a list of shares must have one for each of the {rounds} rounds, not {len(kind)}")
    return [float(share) for share in kind]
