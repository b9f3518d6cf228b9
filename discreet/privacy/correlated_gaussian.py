"""Correlated Gaussian noise: a linear combination of a round's own noise and that of earlier
rounds, which is drawn again from keys.

Each round's noise is the stream of one key, so that no noise is stored: a vector is drawn in
pieces, for any number of rounds. On the grid the combination of exact Gaussians is rounded once, as
`discreet.privacy.grid` rounds a single one: the release x + round(y) = round(x + y) is that of the
real-valued mechanism, rounded. The noise is a function of the keys alone.

Drawing all earlier noise again takes longer in each round. So the share of finished blocks of
rounds in the noise of the next block may be drawn in one pass, and is held until that block is
over: one vector for each of its rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import lru_cache

import torch
from torch import Tensor

from discreet.privacy.grid import ERROR, LARGEST_SCALE, Grid, first_normal, second_normal
from discreet.privacy.randomness import CHUNK, RandomSource, signed

# the first words of a round's stream, before its noise: a key for more bits
KEY_WORDS = 4
# bound on the rounding error of one term and of the sum so far, for weights that add up to 1
ADDING = 2.0**-48
# the weight of each round's noise, and the key from which the noise is drawn
Parts = Sequence[tuple[float, bytes]]
Rows = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class RoundBlock:
    """A block of rounds that share one pass over the noise of the blocks before it.

    Attributes:
      at: index of this round in the block, from 0 on.
      rows: for each round of the block, the weights of the rounds of earlier blocks, which come
        last in the round's parts.
    """

    at: int
    rows: Rows


@dataclass(frozen=True)
class CorrelatedGaussian:
    """The Gaussian mechanism with noise sum_j weight_j z_j: independent z_j of stddev
    noise_multiplier * sensitivity.

    A noise multiplier of 0 protects nobody.
    """

    noise_multiplier: float

    def stddev(self, sensitivity: float) -> float:
        """Standard deviation of each z_j for an L2 `sensitivity` > 0, in its units, rounded up; 0
        without noise."""
        return self.noise_multiplier and math.nextafter(
            self.noise_multiplier * sensitivity, math.inf
        )

    def add_grid_noise(
        self,
        total: Tensor,
        sensitivity: float,
        *,
        grid: Grid,
        parts: Parts,
        block: RoundBlock | None = None,
    ) -> Tensor:
        """`total`, int64 steps of `grid` (size,), plus the rounded noise of `parts`, which include
        this round's own. A `block` gives the same result in less time."""
        return combined_noise(
            total.numel(), self.stddev(sensitivity) / grid.step, parts, block
        ).add_(total)


def combined_noise(
    count: int, scale: float, parts: Parts, block: RoundBlock | None = None
) -> Tensor:
    """round(scale * sum of weight * z), int64 (count,), where z are the exact Gaussians (count,) of
    a key.

    The error of each sum in floating point is at most scale * sum |weight| * (ERROR + ADDING *
    len(parts)). If that could reach a rounding boundary, the sum is computed again in decimal
    arithmetic of 140 digits.

    Raises:
      ValueError: the weights make noise of more than 2^32 steps.
    """
    span = scale * math.fsum(abs(weight) for weight, _ in parts)
    if not 0 <= span <= LARGEST_SCALE:
        raise ValueError(f"noise must be in [0, 2^32] steps, not {span}")
    noise = torch.zeros(count, dtype=torch.int64)
    if span == 0:
        return noise
    doubt = 0.5 - span * (ERROR + ADDING * len(parts))
    fresh = parts
    before = torch.zeros(count + 1, dtype=torch.float64)
    if block is not None:
        fresh = parts[: len(parts) - len(block.rows[block.at])]
        before = _of_earlier_blocks(
            count, scale, tuple(key for _, key in parts[len(fresh) :]), block.rows
        )[block.at]
    streams = [(weight, *_opened(key)) for weight, key in fresh]
    for start in range(0, count, CHUNK):
        part = noise[start : start + CHUNK]
        sums = before[start : start + len(part) + len(part) % 2].clone()
        for weight, source, more in streams:
            sums.add_(
                _normal(source, len(sums), more + start.to_bytes(8, "big")), alpha=weight * scale
            )
        nearest = sums.round()
        unsure = sums.sub_(nearest).abs_() >= doubt
        rounded = nearest.long()
        for index in unsure[: len(part)].nonzero().flatten().tolist():
            rounded[index] = _exactly(start, index, len(sums), scale, parts)
        part.copy_(rounded[: len(part)])
    return noise


@lru_cache(maxsize=1)
def _of_earlier_blocks(count: int, scale: float, keys: tuple[bytes, ...], rows: Rows) -> Tensor:
    """For each row of weights the sum of scale * weight * z over the keys, float64 (rows, count +
    1)."""
    sums = torch.zeros(len(rows), count + 1, dtype=torch.float64)
    weights = torch.tensor(rows, dtype=torch.float64)
    streams = [_opened(key) for key in keys]
    for start in range(0, count, CHUNK):
        part = sums[:, start : start + min(CHUNK, count - start + (count - start) % 2)]
        for each, (source, more) in zip(weights.mul(scale).T, streams, strict=True):
            part.addr_(each, _normal(source, part.shape[1], more + start.to_bytes(8, "big")))
    return sums


def _opened(key: bytes) -> tuple[RandomSource, bytes]:
    source = RandomSource(key, is_secure=True)
    return source, source.words(KEY_WORDS).tobytes()


def _normal(source: RandomSource, count: int, key: bytes) -> Tensor:
    """The next Gaussians of a stream, float64 (count,), each with an error of at most ERROR. More
    bits come from `key`."""
    words = signed(source.words(count))
    values, near_end = first_normal(words)
    for index in near_end.nonzero().flatten().tolist():
        with localcontext(prec=140):
            values[index] = float(second_normal(words, index, key))
    return values


def _exactly(start: int, index: int, count: int, scale: float, parts: Parts) -> int:
    """The rounded sum at `index` in the piece of `count` values that begins at `start`."""
    with localcontext(prec=140):
        total = Decimal("0.5")
        for weight, key in parts:
            source, more = _opened(key)
            words = signed(source.words(start + count))[start:]
            total += (
                Decimal(weight)
                * Decimal(scale)
                * second_normal(words, index, more + start.to_bytes(8, "big"))
            )
        return math.floor(total)
