"""The event of secure aggregation, a sum of several clients' discrete Gaussians, and its accounting
by Renyi divergence.

Kairouz, Liu and Steinke 2021, "The Distributed Discrete Gaussian Mechanism for Federated Learning
with Secure Aggregation" (arXiv 2102.06387).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dp_accounting import DpEvent

MOST_SUMMANDS = 10_000


@dataclass(frozen=True)
class DistributedDiscreteGaussianDpEvent(DpEvent):  # type: ignore[misc]  # dp_accounting has no types
    """A sum of integer vectors, to which each of `summands` clients has added N_Z(0, variance) in
    every coordinate.

    Adjacency: zero out one member; it is still counted, and a client still adds its noise. Between
    neighbours the sum moves by an integer vector whose squared L2 norm is at most
    `sensitivity_squared`. Adding more noise, or taking the sum modulo a number, is post-processing
    of this release.

    Attributes:
        variance: sigma^2 of one client's noise, in steps^2, at least 1.
        summands: h, the number of clients whose noise is certainly in the sum and unknown to the
          observer.
        sensitivity_squared: Delta^2, in steps^2.
        dimension: d, the number of released coordinates.
    """

    variance: int
    summands: int
    sensitivity_squared: int
    dimension: int

    def __post_init__(self) -> None:
        for name in ("variance", "summands", "sensitivity_squared", "dimension"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"{name} of an event must be a whole number of at least 1, not {value!r}"
                )
        if self.summands > MOST_SUMMANDS:
            raise ValueError(
                f"summands of an event must be at most {MOST_SUMMANDS}, not {self.summands}"
            )

    @property
    def renyi_noise_multiplier(self) -> float:
        """1 / eps, where this release is (eps^2 / 2)-concentrated: its Renyi divergence at every
        order is at most that of a Gaussian of this noise multiplier. The bound holds for Renyi
        divergences only, not for a PLD.

        eps = Delta / (sqrt(h) sigma) + tau * sqrt(d'), where d' = min(d, Delta^2) bounds the
        coordinates that differ (each by a whole step at least), and tau is that of
        `convolution_gap`.

        Proof: let P be the distribution of a sum of h discrete Gaussians and W = N_Z(0, h sigma^2),
        with |log(P / W)| <= tau / 2 everywhere. The Renyi divergences of order a between P and W,
        in either direction, are at most a (tau / 2)^2 / 2 in one coordinate, as for any pair whose
        pure epsilon is tau / 2, and d' times that in the coordinates that differ (Bun and Steinke
        2016). The divergence of W moved by Delta from W is at most a Delta^2 / (2 h sigma^2)
        (Canonne, Kamath and Steinke 2020). The eps of such bounds a eps^2 / 2 add up along a chain,
        by Hoelder's inequality (Bun and Steinke 2016): here from P moved to W moved, to W, to P.
        This is the last of the three bounds in Proposition 14 of Kairouz, Liu and Steinke 2021, the
        second in their Theorem 1, with d' in place of d.
        """
        gaussian = math.sqrt(self.sensitivity_squared / (self.summands * self.variance))
        differing = min(self.dimension, self.sensitivity_squared)
        return 1 / (gaussian + convolution_gap(self.variance, self.summands) * math.sqrt(differing))


def convolution_gap(variance: int, summands: int) -> float:
    """tau = 10 * sum over k = 1 .. h - 1 of exp(-2 pi^2 sigma^2 k / (k + 1)): 0 for one summand.

    A sum of h discrete Gaussians is not a discrete Gaussian, but at every integer its probability
    is within a factor of exp(tau / 2) of that of N_Z(0, h sigma^2), for sigma^2 >= 1/4 (Kairouz,
    Liu and Steinke 2021, Theorem 1 and its proof). For sigma^2 = 4 it is 7e-17, which is
    negligible.

    >>> convolution_gap(1, 1), round(convolution_gap(1, 10), 6)
    (0.0, 0.000544)
    """
    return 10 * math.fsum(
        math.exp(-2 * math.pi**2 * variance * k / (k + 1)) for k in range(1, summands)
    )
