"""Noise that is correlated over rounds (matrix factorisation): its matrices, the sensitivity of a
run if clients take turns, and its error.

Round t releases x_t + (C^-1 z)_t. Here x_t is the sum of what clients send, and z are independent
Gaussians of standard deviation sigma, combined such that the noise of later rounds cancels part of
the noise of earlier ones. C is lower triangular and Toeplitz, with the first column c_0 = 1, c_1,
.. ("factor"); so is C^-1, with w_0 = 1, w_1, .. ("weights"). The releases determine C x + z and
follow from it, so they cost as much as these T Gaussian releases.

Sensitivity. A client that has a turn every b rounds adds a vector of norm at most 1 (in clip norms)
in each of its turns, so that C x moves in round t by at most the sum of c_(t-s) over its turns s
until t. For coefficients that are not negative and never rise, the sum of the squares of these
moves over any first rounds is largest if the turns are 0, b, 2b, .. (Kalinin and Lampert 2024,
arXiv 2405.13763, Theorem 2); a missed turn makes no move larger. By the `moves` of those turns the
first t rounds cost a client at most a Gaussian of noise multiplier sigma / sqrt(moves_1^2 + .. +
moves_t^2).

Each round is charged as a Gaussian of sigma / moves_t. This is exactly the difference between the
costs of the first t and the first t - 1 rounds, since the squares of 1 / multiplier of Gaussian
releases add up. For the clients of another group the move of a single round may be larger than the
one that is charged, but their first t moves together never cost more. The bounds on a client's
moves are constants of its group and do not depend on earlier releases: the rounds are an adaptive
composition of Gaussians, into which other releases may be mixed. A round that is repeated with
other noise is one more release beside these: it is charged as its `largest_move`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from discreet.accounting.events import BISR, CORRELATIONS, NONE, SQRT

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Series = NDArray[np.float64]

_ROUNDING = 1 + 2.0**-40  # factor by which sensitivities are rounded up, for float64 errors


def never_rises(factor: Series) -> bool:
    """True if no coefficient of C is negative or above the one before it: then by how much a client
    moves C x depends on its own turns alone."""
    return bool(factor.min() >= -1e-12 and (factor[1:] <= factor[:-1] + 1e-12).all())


@lru_cache(maxsize=64)
def factor_and_weights(kind: str, bandwidth: int, rounds: int) -> tuple[Series, Series]:
    """The first columns of C and of C^-1 for a number of rounds, each (rounds,).

    `none`: the identity. `sqrt`: the square root of the prefix-sum matrix, c_k = binom(2k, k) /
    4^k. `bsr`: the first `bandwidth` of these, then 0. `bisr`: the inverse is banded instead, w_k =
    -c_k / (2k - 1) for k < bandwidth (Kalinin, McKenna, Upadhyay and Lampert 2025, arXiv
    2505.12128).

    Raises:
      ValueError: a coefficient of C is negative or above the one before it, so that the sensitivity
        would not be known.

    >>> [round(float(c), 4) for c in factor_and_weights("bsr", 3, 4)[0]]
    [1.0, 0.5, 0.375, 0.0]
    """
    import numpy as np

    if kind not in CORRELATIONS or bandwidth < 1 or rounds < 1:
        raise ValueError(
            f"there is no noise of the kind {kind} with bandwidth {bandwidth} for {rounds} rounds"
        )
    steps = np.arange(1, rounds)
    root = np.concatenate(([1.0], np.cumprod((2 * steps - 1) / (2 * steps))))
    width = {NONE: 1, SQRT: rounds}.get(kind, bandwidth)
    band = np.arange(rounds) < width
    if kind == BISR:
        weights = np.where(band, -root / (2 * np.arange(rounds) - 1), 0.0)
        factor = _inverse(weights)
    else:
        factor = np.where(band, root, 0.0)
        weights = _inverse(factor)
    if not never_rises(factor):
        raise ValueError(
            f"the coefficients of {kind} noise with bandwidth {bandwidth} are negative or rise"
        )
    return factor, weights


@dataclass(frozen=True)
class Turns:
    """A run in which each client has a turn every `groups` rounds, with noise of a kind and
    bandwidth.

    >>> [round(Turns(*how).sensitivity, 6) for how in (("none", 1, 28, 100), ("bsr", 2, 2, 4))]
    [2.0, 1.581139]
    """

    kind: str
    bandwidth: int
    groups: int
    rounds: int

    @property
    def factor(self) -> Series:
        """The first column of C."""
        return factor_and_weights(self.kind, self.bandwidth, self.rounds)[0]

    @property
    def weights(self) -> Series:
        """The first column of C^-1."""
        return factor_and_weights(self.kind, self.bandwidth, self.rounds)[1]

    def moves(self) -> Series:
        """The largest move of C x in each round by a client of the first group, in clip norms,
        (rounds,)."""
        moved = self.factor.copy()
        for turn in range(self.groups, self.rounds, self.groups):
            moved[turn:] += self.factor[: self.rounds - turn]
        return moved * _ROUNDING

    def largest_move(self, number: int) -> float:
        """The largest move of C x in round `number` by any client, in clip norms. A client whose
        turn it is makes it."""
        return float(self.factor[: number : self.groups].sum()) * _ROUNDING

    @property
    def sensitivity(self) -> float:
        """The L2 sensitivity of all rounds together, in clip norms. Their noise multiplier is sigma
        over this."""
        return math.hypot(*self.moves().tolist())

    @property
    def late_noise(self) -> float:
        """The standard deviation of the whole noise of a late round, over sigma."""
        return math.hypot(*self.weights.tolist())

    @property
    def running_sum_noise(self) -> float:
        """The noise on the running sum of updates: the root mean square over the rounds, over
        sigma.

        In round t its variance is the sum of the squares of the first t partial sums of the
        weights.
        """
        squares = self.weights.cumsum() ** 2
        return math.sqrt(float(squares.cumsum().mean()))

    @property
    def error(self) -> float:
        """The noise on the running sum, in clip norms, of a run whose noise multiplier is 1."""
        return self.sensitivity * self.running_sum_noise


@lru_cache(maxsize=64)
def best_bandwidth(kind: str, *, groups: int, rounds: int) -> int:
    """The bandwidth with the least `error`, up to twice the number of groups; beyond that, turns
    overlap ever more.

    >>> best_bandwidth("bsr", groups=28, rounds=100), best_bandwidth("bisr", groups=28, rounds=100)
    (28, 12)
    """
    if kind in (NONE, SQRT):
        return 1
    widths = range(1, min(rounds, 2 * groups) + 1)
    return min(widths, key=lambda width: Turns(kind, width, groups, rounds).error)


def _inverse(series: Series) -> Series:
    """The first coefficients of 1 / series, as many as `series` has; its first one must be 1."""
    import numpy as np
    from scipy.signal import lfilter  # imported here: a client that plans nothing starts without it

    found: Series = lfilter([1.0], series, np.eye(1, len(series))[0])
    return found
