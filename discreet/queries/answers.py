"""The parts of a client's answer to a query, and what a server reads from the noised mean of all
answers.

An answer is made of blocks. Each block has a public length and a bound that the L2 norm of no
client's block passes. Blocks are centred if that halves their bound: a share in 0..1 is sent as
-1/2..1/2. A client's own mean counts, not its number of examples: each client weighs the same, and
so does each example in a client's mean.

Reading is post-processing of what was released, and costs nothing: values are cut to what is
possible, and a cumulative histogram is made monotone. A standard error is that of the noise and of
the cohort's sampling together, by the delta method: to first order in the noise, around what was
released. Sampling counts with a bound on how much clients differ, since how much they do is not
released; so the error is rather too large than too small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# From the values (n, ...) and the targets of at least one example to a block, (length,) float64.
# The values are a model's outputs for a metric, and inputs for a statistic.
Answer = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Estimate:
    """A number that was read from noise: NaN with an infinite standard error if the noise leaves
    nothing to read."""

    value: float
    standard_error: float


UNKNOWN = Estimate(math.nan, math.inf)


@dataclass(frozen=True)
class AnswerPart:
    """A part of an answer.

    Attributes:
      name: the metric or statistic.
      bound, l1_bound: the largest L2 and L1 norm of a client's block.
      answer: from a client's examples to its block.
      read: the estimates of the noised mean, by name. Those of a statistic have a further name: of
        a column or class.
      shares: the numbers are shares of a whole, none of them negative.
      of: the names of the scores that AUC is about.
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
    """The noised mean of one block over clients, in the block's own units: a client that did not
    answer is zeros.

    Attributes:
      stddev: of the noise on each number.
      sampling: the variance of the mean over a Poisson cohort of numbers whose mean square over the
        population is 1.
    """

    block: AnswerPart
    mean: Tensor
    stddev: float
    sampling: float = 0.0

    def estimate(self, function: Callable[[Tensor], Tensor], low: float, high: float) -> Estimate:
        """A smooth function of the mean, cut to low..high, by the delta method."""
        mean = self.mean.clone().requires_grad_()
        value = function(mean)
        (gradient,) = torch.autograd.grad(value, mean)
        return clamped(float(value.detach()), self.error(gradient), low, high)

    def number(
        self, place: int, low: float, high: float, *, zero: float, unit: float = 1.0
    ) -> Estimate:
        """One number of the mean, as zero + unit * number, cut to low..high."""
        return self.estimate(lambda mean: zero + unit * mean[place], low, high)

    def error(self, gradient: Tensor, more: float = 0.0) -> float:
        """The root of the mean squared error of gradient * mean, and of an independent error
        `more`. Sampling counts with a bound on the mean square, over clients, of gradient * answer.
        Shares are weights of at most 1 (Jensen)."""
        squares = gradient.square()
        spread = self.block.bound**2 * float(squares.sum())
        if self.block.shares:
            spread = float((self.mean.clamp(min=0) * squares).sum()) * self.block.l1_bound
        return math.sqrt(self.stddev**2 * float(squares.sum()) + self.sampling * spread + more**2)


def clamped(value: float, error: float, low: float, high: float) -> Estimate:
    """An estimate in low..high; `UNKNOWN` if value or error is not finite."""
    known = math.isfinite(value) and math.isfinite(error)
    if known:
        return Estimate(min(max(value, low), high), error)
    return UNKNOWN


def root_of(square: Estimate) -> Estimate:
    """The root of an estimate of at least 0. Its error is not by the slope of the root, which has
    none at 0, but by how far the root moves with the square's own error."""
    error = square.standard_error
    root, low, high = (math.sqrt(max(square.value + step, 0.0)) for step in (0.0, -error, error))
    return Estimate(root, max(high - root, root - low))


def bins_of(values: Tensor, low: float, high: float, count: int) -> Tensor:
    """The number of the bin, of `count` equally wide ones of low..high, that holds each value.
    Values outside, and NaN, go to the nearest bin, NaN to the first.

    >>> bins_of(torch.tensor([-9.0, 0.0, 0.3, 1.0, torch.nan]), 0, 1, 4).tolist()
    [0, 0, 1, 3, 0]
    """
    places = ((values.double() - low) / (high - low) * count).nan_to_num(
        0.0, posinf=count, neginf=0.0
    )
    return places.clamp(0, count - 1).floor().long()


def shares_of(places: Tensor, count: int) -> Tensor:
    """For each column of places (n, k) the share of rows at each of `count` places: (k * count,),
    norm <= sqrt(k)."""
    counts = torch.stack([torch.bincount(column, minlength=count) for column in places.T])
    return (counts.double() / len(places)).reshape(-1)


def quantile(part: NoisedBlock, share: float, edges: Tensor) -> Estimate:
    """A quantile of a histogram's shares with edges (length + 1,), and by how much it moves if the
    cumulative histogram, made monotone, moves by its standard error; at least half a bin, for
    inside a bin nothing is known."""
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
    """The cumulative histogram (length + 1,) of noised shares that sum to 1, from 0 to 1: the
    nearest one, in squares, that rises."""
    from sklearn.isotonic import isotonic_regression

    heights = isotonic_regression(shares.cumsum(0).numpy(), y_min=0.0, y_max=1.0)
    return torch.cat([torch.zeros(1, dtype=torch.float64), torch.from_numpy(heights)])


def _crossing(curve: Tensor, edges: Tensor, share: float) -> float:
    """The place at which a rising curve over edges reaches a share: the middle if it stays there
    for a while."""
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
