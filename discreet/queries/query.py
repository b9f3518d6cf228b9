"""Queries: each client of a cohort answers with one vector, and the server computes estimates from
the noised sum.

A client's answer is a vector (length,) of L2 norm at most 1, whatever its data are, so that adding
or removing one client moves the sum by at most 1. The server clips each answer to that norm once
more, adds the answers up, adds Gaussian noise, and divides by public constants alone. At example
level each client noises its own answer (`discreet.node.client`). A client that is missing, or whose
answer is malformed, adds zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from discreet.data.examples import TaskShape
from discreet.protocol.messages import EVALUATION, NORMALISE, OF_DATA
from discreet.queries.answers import AnswerPart, NoisedBlock
from discreet.queries.metrics import metric_blocks
from discreet.queries.statistic_answers import DataShape, statistic_blocks
from discreet.settings.client_settings import ClientSettings
from discreet.settings.data import StatisticsConfig
from discreet.settings.rules import ConfigError


@dataclass(frozen=True)
class Sums:
    """A noised sum of answers, (length,), with the public constants for its estimates.

    Attributes:
      expected_cohort: q * population_size, by which the sum is divided whoever has answered.
      stddev: standard deviation of the noise on each coordinate.
      probability: q, the probability that a client is asked.
    """

    values: Sequence[float]
    expected_cohort: float
    stddev: float
    probability: float = 1.0


@dataclass(frozen=True)
class Query:
    """Blocks that are asked for together. An answer holds each block divided by its bound and times
    a common weight; the squares of the weights sum to 1. So one Gaussian of sensitivity 1 covers
    all."""

    blocks: tuple[AnswerPart, ...]

    @property
    def length(self) -> int:
        """The number of coordinates of an answer."""
        return sum(block.length for block in self.blocks)

    @property
    def weight(self) -> float:
        """The common weight of the blocks."""
        return 1 / math.sqrt(len(self.blocks))

    @property
    def l1_norm(self) -> float:
        """The bound on the L1 norm of every answer."""
        return self.weight * sum(block.l1_bound / block.bound for block in self.blocks)

    def answer(self, values: Tensor, targets: Tensor) -> Tensor:
        """A client's answer, (length,) float64, of L2 norm at most 1; zeros without examples, like
        a missing answer. The bound does not rely on the blocks: a block that is not finite becomes
        zeros, as does one of another size, and one of a larger norm is scaled down.

        Args:
          values: outputs of the model (n, ...) for the examples that the client holds out; its
            inputs for statistics.
          targets: as in `Examples`.
        """
        if len(targets) == 0:
            return torch.zeros(self.length, dtype=torch.float64)
        values = values.detach().cpu().double()
        targets = targets.detach().cpu()
        parts = [
            _of_length(block.length, clipped_answer(block.answer(values, targets), block.bound))
            * (self.weight / block.bound)
            for block in self.blocks
        ]
        return torch.cat(parts)

    def noised(self, sums: Sums) -> list[NoisedBlock]:
        """The noised mean over clients of each block, in its own units. Raises ValueError: the sum
        has another length."""
        if len(sums.values) != self.length:
            raise ValueError(f"the sum must have {self.length} numbers, not {len(sums.values)}")
        mean = torch.tensor(sums.values, dtype=torch.float64) / sums.expected_cohort
        population = round(sums.expected_cohort / sums.probability)
        sampling = (1 - sums.probability) / (sums.probability * population)
        parts = zip(
            self.blocks, torch.split(mean, [block.length for block in self.blocks]), strict=True
        )
        stddev = sums.stddev / sums.expected_cohort
        return [
            NoisedBlock(
                block,
                part * (block.bound / self.weight),
                stddev * block.bound / self.weight,
                sampling,
            )
            for block, part in parts
        ]

    def read(self, sums: Sums) -> dict[str, Any]:
        """The estimates by name: one `Estimate` for a metric; for a statistic one for each column,
        class or label. Raises as `noised`."""
        return {
            name: found
            for part in self.noised(sums)
            for name, found in part.block.read(part).items()
        }

    def names(self) -> tuple[str, ...]:
        """The names of the estimates."""
        return tuple(self.read(Sums([0.0] * self.length, expected_cohort=1.0, stddev=1.0)))


def _of_length(length: int, block: Tensor) -> Tensor:
    """A block of a public length; zeros for one of another, as of classes that there are not."""
    return block if len(block) == length else torch.zeros(length, dtype=torch.float64)


def clipped_answer(block: Tensor, bound: float) -> Tensor:
    """A block scaled down to L2 norm `bound` if it is longer; zeros if it is not finite."""
    if not block.isfinite().all():
        return torch.zeros_like(block)
    norm = float(block.norm())
    if norm > bound:
        return block * (bound / norm)
    return block


def query_of(name: str, run: ClientSettings, shape: TaskShape) -> Query:
    """The query of that name in a run on data of this shape. Raises ConfigError: there is no such
    query, or a metric does not fit the targets."""
    if name in OF_DATA:
        if name == NORMALISE:
            names = ["moments"]
        else:
            names = run.statistics.of
        return Query(statistic_blocks(names, shape_of_data(run.statistics, shape)))
    if name != EVALUATION:
        raise ConfigError(f"a query must be one of {EVALUATION}, {', '.join(OF_DATA)} (got {name})")
    try:
        return Query(metric_blocks(run.evaluation.metrics, shape))
    except ValueError as error:
        raise ConfigError(f"evaluation.metrics {error}") from error


def shape_of_data(asked: StatisticsConfig, shape: TaskShape) -> DataShape:
    """The public facts of the data for statistics. Raises ConfigError: the range of the data is not
    configured, or there are no statistics for such data."""
    if asked.low is None or asked.high is None:
        raise ConfigError(
            "statistics.low and statistics.high must be given: these data declare no range of "
            "inputs"
        )
    if shape.num_tokens or len(shape.input_shape) not in (1, 3):
        raise ConfigError(
            f"statistics are of columns or of images, not of inputs {shape.input_shape} of text"
        )
    return DataShape(shape, asked.low, asked.high, asked.most_examples)
