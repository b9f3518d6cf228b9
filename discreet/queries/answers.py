"""The parts of a client's answer to a query, and the server's estimates from the noised mean of all
answers.

An answer is made of blocks. Each block has a public length and a bound on its L2 norm that holds
for every client. Blocks are centred if that halves their bound: a share in 0..1 is sent as
-1/2..1/2. Each client has the same weight, whatever its number of examples, and so does each
example in a client's mean.

Estimation is post-processing of the release and costs no privacy: values are clamped to their
range, and a cumulative histogram is made monotone. A standard error covers the noise and the
sampling of the cohort together, by the delta method: to first order in the noise, around the
released value. The sampling part uses a bound on the variation between clients, since the variation
itself is not released, so the standard error tends to be too large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Maps the values (n, ...) and the targets of at least one example to a block, (length,) float64.
# The values are a model's outputs for a metric, and inputs for a statistic.
Answer = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Estimate:
    """An estimate from a noised release; NaN with an infinite standard error if the noise is too
    large for one."""

    value: float
    standard_error: float


UNKNOWN = Estimate(math.nan, math.inf)


@dataclass(frozen=True)
class AnswerPart:
    """A part of an answer.

    Attributes:
      name: the metric or statistic.
      bound, l1_bound: the largest L2 and L1 norm of a client's block.
      answer: maps a client's examples to its block.
      read: maps the noised mean to estimates by name; for a statistic by name, then by column or
        class.
      shares: True if the numbers are shares of a whole, none of them negative.
      of: the names of the scores of an AUC.
    """

    name: str
    length: int
    bound: float
    l1_bound: float
    answer: Answer
    read: Callable[[NoisedBlock], Mapping[str, Any]]
    shares: bool = False
    of: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class NoisedBlock:
    """The noised mean of one block over clients, in the block's own units. A client that did not
    answer counts as zeros.

    Attributes:
      stddev: standard deviation of the noise on each number.
      sampling: the variance of the mean, over a Poisson cohort, of numbers whose mean square over
        the population is 1.
    """

    block: AnswerPart
    mean: Tensor
    stddev: float
    sampling: float = 0.0

    def estimate(self, function: Callable[[Tensor], Tensor], low: float, high: float) -> Estimate:
        """The estimate of a smooth function of the mean, clamped to low..high, by the delta
        method."""
        mean = self.mean.clone().requires_grad_()
        value = function(mean)
        (gradient,) = torch.autograd.grad(value, mean)
        return clamped(float(value.detach()), self.error(gradient), low, high)

    def number(
        self, place: int, low: float, high: float, *, zero: float, unit: float = 1.0
    ) -> Estimate:
        """The estimate of zero + unit * mean[place], clamped to low..high."""
        return self.estimate(lambda mean: zero + unit * mean[place], low, high)

    def error(self, gradient: Tensor, more: float = 0.0) -> float:
        """The root mean squared error of gradient * mean together with an independent error `more`.
        The sampling part uses a bound on the mean square, over clients, of gradient * answer.
        Shares are weights of at most 1 (Jensen)."""
        squares = gradient.square()
        spread = self.block.bound**2 * float(squares.sum())
        if self.block.shares:
            spread = float((self.mean.clamp(min=0) * squares).sum()) * self.block.l1_bound
        return math.sqrt(self.stddev**2 * float(squares.sum()) + self.sampling * spread + more**2)


def clamped(value: float, error: float, low: float, high: float) -> Estimate:
    """An estimate clamped to low..high; `UNKNOWN` if value or error is not finite."""
    known = math.isfinite(value) and math.isfinite(error)
    if known:
        return Estimate(min(max(value, low), high), error)
    return UNKNOWN


def root_of(square: Estimate) -> Estimate:
    """The square root of an estimate that is at least 0. Its error is the change of the root when
    the square moves by its own error; the slope of the root can't be used, as it is infinite at
    0."""
    error = square.standard_error
    root, low, high = (math.sqrt(max(square.value + step, 0.0)) for step in (0.0, -error, error))
    return Estimate(root, max(high - root, root - low))


def bins_of(values: Tensor, low: float, high: float, count: int) -> Tensor:
    """The index of the bin that holds each value, of `count` equally wide bins of low..high. Values
    outside go to the nearest bin, NaN to the first.

    >>> bins_of(torch.tensor([-9.0, 0.0, 0.3, 1.0, torch.nan]), 0, 1, 4).tolist()
    [0, 0, 1, 3, 0]
    """
    places = ((values.double() - low) / (high - low) * count).nan_to_num(
        0.0, posinf=count, neginf=0.0
    )
    return places.clamp(0, count - 1).floor().long()


def shares_of(places: Tensor, count: int) -> Tensor:
    """For each column of bin indices (n, k) the share of rows in each of `count` bins, (k *
    count,), of L2 norm at most sqrt(k)."""
    counts = torch.stack([torch.bincount(column, minlength=count) for column in places.T])
    return (counts.double() / len(places)).reshape(-1)


def quantile(part: NoisedBlock, share: float, edges: Tensor) -> Estimate:
    """A quantile of a histogram of shares with edges (length + 1,). Its standard error is its
    change when the monotone cumulative histogram moves by its own, and at least half a bin, since
    positions inside a bin are unknown."""
    total = float(part.mean.sum())
    if not total > 0:
        return UNKNOWN
    curve = rising(part.mean / total)
    value = _crossing(curve, edges, share)
    place = int(torch.searchsorted(edges, value, right=True).clamp(1, len(edges) - 1))
    below = (torch.arange(len(part.mean)) < place).double()
    error = part.error((below - share) / total)
    low = _crossing(curve, edges, share - error)
    high = _crossing(curve, edges, share + error)
    return Estimate(
        value, max(value - low, high - value, float(edges[place] - edges[place - 1]) / 2)
    )


def rising(shares: Tensor) -> Tensor:
    """The monotone cumulative histogram (length + 1,), from 0 to 1, nearest in least squares to
    that of noised shares, which sum to 1."""
    from sklearn.isotonic import isotonic_regression

    heights = isotonic_regression(shares.cumsum(0).numpy(), y_min=0.0, y_max=1.0)
    return torch.cat([torch.zeros(1, dtype=torch.float64), torch.from_numpy(heights)])


def _crossing(curve: Tensor, edges: Tensor, share: float) -> float:
    """The position at which a monotone curve over edges reaches a share; the middle of the interval
    if the curve is flat there."""
    share = min(max(share, 0.0), 1.0)
    places = []
    for right in (False, True):
        after = int(torch.searchsorted(curve, share, right=right).clamp(1, len(curve) - 1))
        rise = float(curve[after] - curve[after - 1])
        if rise > 0:
            part = (share - float(curve[after - 1])) / rise
        else:
            part = 0.5
        part = min(max(part, 0.0), 1.0)
        places.append(float(edges[after - 1]) + part * float(edges[after] - edges[after - 1]))
    return sum(places) / 2
