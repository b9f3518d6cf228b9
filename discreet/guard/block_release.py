"""The release of a site: the noised sum of its blocks' clipped updates, charged before any block
starts.

The guarantee (sample and aggregate: Nissim, Raskhodnikova and Smith 2007; GUPT, Mohan et al. 2012).
A patient is in one block, and stays out of all others. The app's output for that block can be any
point in the ball of radius C, with or without the patient: the sum moves by at most 2C. Not by C:
the block does not vanish with the patient. So the noise is for 2C, and a round is charged as
PoissonSampled(q, Gaussian(z)), also where the app keeps a state in each block. Given what was
released before and the coins of the other blocks, a round is the mixture (1 - q) N(0) + q N(u)
against (1 - q) N(0) + q N(u') with |u| <= C and |u'| <= C. docs/accounting.md proves which of these
pairs dominates; the guard composes it beside the charge, and goes by the larger epsilon.

In the first round of a run the guard also looks at a noised count of failures, and refuses to go on
with an app all of whose blocks have failed. A block counts +1/2 if it fails, -1/2 if not, and 0 if
it was not drawn, and the count has Gaussian noise of its own, s. The updates get noise of z_u =
(z^-2 - s^-2)^(-1/2) in place of z. The vector (u / (2 C z_u), count / s) of a block then has a norm
of at most sqrt(1 / z_u^2 + 1 / s^2) / 2 = 1 / (2 z), as u / (2 C z) has without a count. So both
together cost what the round was charged, and the proof is that of this vector.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray
from torch import Tensor

from discreet.flower.array_layout import ArrayLayout, layout_of
from discreet.guard.guard_policy import GuardPolicy, GuardTerms, MetricSettings
from discreet.node.account import Refused
from discreet.privacy.blocks_grid import MOVES, blocks_grid
from discreet.privacy.clipping import ClippedSum
from discreet.privacy.grid import Grid
from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.private import Private
from discreet.privacy.randomness import RandomSource
from discreet.protocol import messages
from discreet.protocol.messages import MalformedMessage
from discreet.settings.rules import ConfigError

Vector = NDArray[np.float32]
MOST_ARRAYS = 10_000
HALVES = Grid(0.5)  # of a count of blocks
SURE = 7.0  # standard deviations between the middle and either end of a count, where it is free
LEAST_SURE = 3.0
LEAST_COUNT_NOISE = 1.5


@dataclass(frozen=True, repr=False)
class BlockSum(Private):
    """The sum of one vector per block, on the grid; the number of blocks that ran, and of those
    that returned no finite vector."""

    total: Tensor
    drawn: int
    failed: int


@dataclass(frozen=True)
class BlockRelease:
    """The mechanism of one round: clip each block's vector (size,), add them up, noise, divide by q
    times the blocks.

    Guarantee: add, remove or change one unit of one block; the event is `GuardPolicy.event`.

    Attributes:
      size: the length of a block's vector.
      terms: clip norm and noise multiplier.
      q: the probability with which a block is drawn.
      blocks: how many there are, a public number.
      counts: this round releases a noised count of failures too.
    """

    size: int
    terms: GuardTerms
    q: float
    blocks: int
    counts: bool = False

    def add_up(self, vectors: Iterable[Vector | None]) -> BlockSum:
        """The sum without noise. A block that failed (None) or returned a vector that is not finite
        counts as zero."""
        clip_norm = self.terms.clip_norm
        summed = ClippedSum(self.size, clip_norm, grid=self.grid)
        drawn = failed = 0
        for vector in vectors:
            drawn += 1
            if vector is None or not np.isfinite(vector).all():
                failed += 1
                continue
            summed.add(torch.from_numpy(vector).unsqueeze(0))
        return BlockSum(summed.values, drawn, failed)

    def mean(self, summed: BlockSum, source: RandomSource) -> Tensor:
        """The noised mean (size,), float64. The noise is calibrated to 2C, whichever blocks ran,
        failed, were empty or ended late: none decides whether another counts."""
        gaussian = Gaussian(self.noise_multiplier)
        sensitivity = MOVES * self.terms.clip_norm
        noised = gaussian.add_grid_noise(summed.total, sensitivity, grid=self.grid, source=source)
        return self.grid.to_float(noised, torch.float64) / (self.q * self.blocks)

    def all_failed(self, summed: BlockSum, source: RandomSource) -> bool:
        """True if the noised count says that every block failed: it is above three quarters of the
        expected number of blocks. A step of the count is half a block."""
        centred = torch.tensor([2 * summed.failed - summed.drawn])
        gaussian = Gaussian(self.count_noise)
        counted = gaussian.add_grid_noise(centred, 1.0, grid=HALVES, source=source)
        return 2 * int(counted[0]) > self.q * self.blocks

    @property
    def count_noise(self) -> float:
        """The standard deviation of the count's noise, in blocks: as much as lets it tell an app
        that always fails, and at least 1.5 z, so that the updates' noise grows by a third at
        most."""
        most = self.q * self.blocks / (4 * SURE)
        return max(most, LEAST_COUNT_NOISE * self.terms.noise_multiplier)

    @property
    def can_count(self) -> bool:
        """True if a count of so many blocks tells failure from success by 3 standard deviations."""
        return self.q * self.blocks >= 4 * LEAST_SURE * self.count_noise

    @property
    def noise_multiplier(self) -> float:
        """The noise of the updates, over 2C: with that of the count it costs as much as the
        terms' alone."""
        charged = self.terms.noise_multiplier
        if not self.counts:
            return charged
        return 1 / math.sqrt(charged**-2 - self.count_noise**-2)

    @property
    def grid(self) -> Grid:
        """The grid for exact addition of updates, determined by public values alone."""
        noise = self.noise_multiplier
        return blocks_grid(
            self.size, self.terms.clip_norm, blocks=self.blocks, noise_multiplier=noise
        )


def drawn_blocks(policy: GuardPolicy, source: RandomSource) -> list[int]:
    """The blocks of a round, each drawn with probability q by secret coins."""
    coins = source.uniform(policy.blocks.count)
    return [number for number, coin in enumerate(coins.tolist()) if coin < policy.q]


def read_layout(arrays: ArrayRecord, policy: GuardPolicy, terms: GuardTerms) -> ArrayLayout:
    """The layout of the arrays that a server sent. Refused: they are too many or too large, can't
    be read, have other bytes behind them, or contain values that are not finite or BatchNorm
    statistics that are not frozen."""
    most = policy.limits.model_values
    if len(arrays) > MOST_ARRAYS:
        raise Refused(f"this site's guard accepts at most {MOST_ARRAYS} arrays")
    try:
        values = 0
        for name, array in arrays.items():
            shape, _, dtype, start = messages.header_of(array, name)
            size = int(np.prod(shape, dtype=object))
            values += size
            if values > most:
                raise Refused(f"this site's guard accepts arrays of at most {most} values")
            if len(array.data) != start + size * dtype.itemsize:
                raise Refused(f"the array {name} must have as many bytes as its header says")
        return layout_of(arrays, frozen=terms.frozen)
    except (MalformedMessage, ConfigError) as error:
        raise Refused(f"this site's guard can't train these arrays: {error}") from error


def of_metric(metric: MetricSettings, value: float) -> Vector | None:
    """A block's number as a vector of norm at most 1: the low end of its range maps to -1, the high
    end to 1."""
    if not np.isfinite(value):
        return None
    half = (metric.high - metric.low) / 2
    middle = metric.low + half
    return np.array([np.clip((value - middle) / half, -1, 1)], np.float32)


def metric_of(metric: MetricSettings, mean: float) -> float:
    """The number that a noised mean of `of_metric` vectors represents, within its range."""
    half = (metric.high - metric.low) / 2
    return float(np.clip(metric.low + half + half * mean, metric.low, metric.high))
